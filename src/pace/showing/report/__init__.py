"""The report: one HTML file that shows what a model's concepts are, image by image and patch by patch."""

from pace.showing.report.writing import write_report

__all__ = ["write_report"]
