"""The criteria that heads can be ranked by, one a file."""
