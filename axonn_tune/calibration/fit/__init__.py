"""From the times of single operations to the rates and links of a profile."""
