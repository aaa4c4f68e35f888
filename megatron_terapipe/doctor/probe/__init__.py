"""What collects facts on a host.

Its modules travel there over ssh, so it also runs where this project is not installed. They need the
standard library alone, and import nothing of ours but each other and `facts`.
"""
