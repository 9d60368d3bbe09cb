"""The experiment report, and the record for DVC."""
