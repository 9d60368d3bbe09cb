"""What every stage stands on: typed failures, atomic files, sealed directories, events, locks."""
