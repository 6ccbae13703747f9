"""The ranks of a job: how they start, meet, communicate, record and fail."""
