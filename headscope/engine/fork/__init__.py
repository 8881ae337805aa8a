"""Files of the MHR fork: rows of confidence and of contexts, batch by batch, as pickles."""
