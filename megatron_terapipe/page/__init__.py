"""Parts of report pages: the document, its style sheet, bars, and curves as SVG."""
