"""The one YAML file: read strictly, checked whole, compiled to specs."""
