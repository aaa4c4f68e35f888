"""Descriptions of trainers: what each computes, launches, sends and keeps, one file for each of them."""
