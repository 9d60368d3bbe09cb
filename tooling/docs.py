"""`python -m tooling.docs` (`make docs`): write what docs and recipes have of schema and plan."""

from pathlib import Path

from pipeline_lib.config.docs import config_json_schema, config_page
from pipeline_lib.core.files import write_text
from tooling.recipes import PAGE, RECIPES, recipe_files

CONFIG_PAGE = Path("docs/config.md")
SCHEMA = Path("workflow/schemas/config.schema.json")


def main() -> None:
    """Write the page of the config's keys, its JSON schema, and the figures of the recipes."""
    write_text(CONFIG_PAGE, config_page())
    write_text(SCHEMA, config_json_schema())
    for path, text in recipe_files(Path()).items():
        write_text(path, text)
    print(f"wrote {CONFIG_PAGE}, {SCHEMA}, {PAGE} and the headers of {RECIPES}/*.yaml")


if __name__ == "__main__":
    main()
