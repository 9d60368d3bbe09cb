"""Shows a run elsewhere while it trains: child processes that read metrics.jsonl and feed trackers with it."""
