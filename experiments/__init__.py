"""From raw data to the finished paper: papers as data, runs, measurements, tables, figures and the PDF."""
