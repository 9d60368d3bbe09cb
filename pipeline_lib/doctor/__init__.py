"""What a machine or the nodes of a cluster can do, and what is wrong with them."""
