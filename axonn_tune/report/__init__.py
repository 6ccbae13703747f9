"""Results for people and programs: records, tables, documents. No arithmetic of the model."""
