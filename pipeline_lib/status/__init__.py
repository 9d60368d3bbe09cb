"""Where every experiment of a store stands, read from what lies there: no run is asked, nothing is changed."""
