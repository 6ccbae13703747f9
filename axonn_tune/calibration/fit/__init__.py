"""The fits that turn times of single operations into the rates and links of a profile."""
