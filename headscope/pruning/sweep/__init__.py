"""Methods × sizes × seeds in one table."""
