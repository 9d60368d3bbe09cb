"""Examination of a machine or of a cluster's nodes, and advice on their problems."""
