"""`python -m heads.export` from the checkout runs the same as the installed command `heads.export` (hub_export/export.py)."""

from headstart.hub_export.export import main

if __name__ == "__main__":
    raise SystemExit(main())
