"""HTML reports, figures, terminal output, the walk and model cards."""
