"""Results for people and programs: text, plain data, figures and a page; nothing is computed."""
