"""What maintains this repository and is no part of the library."""
