"""Files that ship with the package: the sample corpus."""
