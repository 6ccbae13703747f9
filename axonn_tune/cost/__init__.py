"""A machine prices operations: arrays of sizes to seconds. No algorithm here."""
