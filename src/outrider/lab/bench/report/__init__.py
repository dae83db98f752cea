"""The report of a sweep: sentences and tables, and one self-contained HTML file with pictures."""
