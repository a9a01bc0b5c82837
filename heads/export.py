"""`python -m heads.export` from the checkout: what the installed command `heads.export` runs (hub_export/export.py)."""

from headstart.hub_export.export import main

if __name__ == "__main__":
    raise SystemExit(main())
