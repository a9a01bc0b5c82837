"""Put a pushed repository into a collection of the Hub, named by its slug or by its title."""

import functools

from huggingface_hub.errors import HfHubHTTPError

from .retry import patiently, reason, status


def check_collection(api, name):
    """ValueError for a slug that the Hub does not know; a title stands for a collection that may yet be made."""
    if not name.strip():
        raise ValueError("--collection is empty: name a slug (OWNER/NAME-ID) or a title")
    if "/" not in name:
        return
    try:
        patiently(functools.partial(api.get_collection, name), f"asking for the collection {name}", attempts=3)
    except HfHubHTTPError as error:
        if status(error) not in (401, 404):
            raise ValueError(f"the collection {name!r} cannot be read: {reason(error)}") from error
        raise ValueError(
            f"there is no collection {name!r}: give the slug that ends its address, or a title without / to have it made"
        ) from None


def add_to_collection(api, name, repo_id, private):
    """Add the repository; a title without a collection of the repository's owner makes one.  Returns the collection's address."""
    if "/" in name:
        slug = name
    else:
        owner = repo_id.split("/")[0]
        doing = f"asking for collections of {owner}"
        found = patiently(lambda: [one for one in api.list_collections(owner=owner) if one.title == name], doing)
        make = functools.partial(api.create_collection, name, namespace=owner, private=private, exists_ok=True)
        slug = (found[0] if found else patiently(make, f"creating the collection {name}")).slug
    add = functools.partial(api.add_collection_item, slug, repo_id, "model", exists_ok=True)
    patiently(add, f"adding to the collection {slug}")
    return f"{api.endpoint}/collections/{slug}"
