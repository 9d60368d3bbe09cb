"""`python -m tooling.docs` (`make docs`): write what docs and recipes have of schema and plan."""

from pathlib import Path

from pipeline_lib.config.docs import config_json_schema, config_page
from pipeline_lib.core.files import write_text
from pipeline_lib.core.language import Language, speaking
from tooling.recipes import PAGE, RECIPES, recipe_files

CONFIG_PAGES: dict[Language, Path] = {
    "en": Path("docs/config.md"),
    "zh": Path("docs/config.zh-CN.md"),
}
SCHEMA = Path("workflow/schemas/config.schema.json")


def main() -> None:
    """Write the pages of the config's keys, its JSON schema, and the figures of the recipes."""
    for language, page in CONFIG_PAGES.items():
        with speaking(language):
            write_text(page, config_page())
    write_text(SCHEMA, config_json_schema())
    for path, text in recipe_files(Path()).items():
        write_text(path, text)
    pages = ", ".join(map(str, CONFIG_PAGES.values()))
    print(f"wrote {pages}, {SCHEMA}, {PAGE} and the headers of {RECIPES}/*.yaml")


if __name__ == "__main__":
    main()
