"""The download stage: models and data from here, from hubs, or made on the spot."""
