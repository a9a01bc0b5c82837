"""Push an exported folder to the Hugging Face Hub.

`check_can_push` comes before any work: a token, an account that answers, the repository's full name. Uploads what is in
the folder as one repository of type "model"; deletes nothing there.
"""

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id


def check_can_push(repo, default_name):
    """The full repository id ("user/name") to push to.

    repo: "user/name", "name" (the account's own) or None, which takes `default_name`.
    Raises ValueError without a token, in offline mode, for a name the Hub does not take, or if it does not know the token.
    """
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or leave --push-to-hub out")
    if get_token() is None:
        raise ValueError(
            "no Hugging Face token to push with: run `hf auth login` or set HF_TOKEN to one that may write"
        )
    try:
        user = HfApi().whoami()["name"]
    except (OSError, HTTPError) as error:
        raise ValueError(f"the Hub at {constants.ENDPOINT} did not accept the token: {_one_line(error)}") from error
    name = repo or default_name
    repo_id = name if "/" in name else f"{user}/{name}"
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(
            f"cannot push to {repo_id!r}: {_one_line(error)}; name it with --push-to-hub USER/NAME"
        ) from None
    return repo_id


def push_folder(folder, repo_id, private=False):
    """Create `repo_id` (if it is not there yet) and upload every file of `folder`.  Returns the address.

    Raises ConnectionError saying what the Hub answered; the folder stays as it is.
    """
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        there = api.model_info(repo_id)
        # A repository that exists keeps its visibility, whatever create_repo was asked for.
        if private and not there.private:
            raise ValueError("it exists already and is public, and --private was asked for")
        ours = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        others = {file.rfilename for file in there.siblings or ()} - ours
        foreign = sorted(name for name in others if name.endswith((".safetensors", ".pt", ".bin")))
        if foreign:
            raise ValueError(f"it holds other weights already ({foreign[0]}), which a reader would mix with these")
        api.upload_folder(folder_path=folder, repo_id=repo_id, commit_message="Upload speculator heads with Headstart")
    except Exception as error:  # the client's transports raise their own kinds; none may end in a traceback here
        raise ConnectionError(
            f"could not push to {repo_id}: {_one_line(error)}. The export itself is complete in {folder}; once that is "
            f"mended, `hf upload {repo_id} {folder}` pushes it"
        ) from error
    return str(address)


def _one_line(error):
    return " ".join(str(error).split())
