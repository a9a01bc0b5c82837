"""Push an exported folder to the Hugging Face Hub, as one repository of type "model". A push that broke off can go on.

    heads.export push exports/first you/first --private          (hub_export/push_command.py)

The Hub is asked for its files, and only missing or changed files are sent: one after another, each in its own request. One commit
then names them all, so that a reader never finds half a head. huggingface_hub sends them (preupload_lfs_files): in Xet's blocks, of
which a killed upload repeats only the newest, or, without hf_xet, as LFS parts, which are repeated one by one while the process
lives (docs/log.md, 2026-11-22, also on why not upload_folder).
If the Hub does not answer (broken connections, 5xx and 429), requests are repeated with growing pauses, a limited number of times.
huggingface_hub repeats some of its requests itself, for half a minute at most. `patiently` repeats the others (creating, asking,
committing), and waits for networks that fail for longer. Requests that the Hub refuses are not repeated.
Deletes nothing on the Hub.
"""

import functools
import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..heads.checkpoint import TREE_FILE
from ..heads.storage.hub_answer import ask_hub

MESSAGE = "Upload speculator heads with Headstart"
WORTH_A_LINE = 50 * 10**6  # bytes; after a file of this size the remaining time is printed
WEIGHTS = (".safetensors", ".pt", ".bin")
# Seconds before the second, third ... attempt of a request: eight minutes in all, then it fails.
PAUSES = (1, 4, 15, 40, 60, 120, 240)
LONGEST_WAIT = 600  # seconds: limit of a Retry-After
FOREIGN = (*WEIGHTS, TREE_FILE)  # endings of names that readers would take for the head's own files


@dataclass(frozen=True)
class PushOptions:
    """Options of a push.  revision: branch, made from main if it does not exist; collection: slug ("owner/name-id") or title"""

    private: bool = False
    revision: str | None = None
    dry_run: bool = False
    collection: str | None = None


@dataclass(frozen=True)
class PlannedFile:
    """A file of the folder.  name: in the repository; state: "new", "changed" or "there" (the same bytes)"""

    name: str
    path: Path
    size: int
    state: str


def check_can_push(repo, default_name, options):
    """The full repository id ("user/name") to push to.

    repo: "user/name", "name" (in the account's own namespace) or None, which means `default_name`.
    Raises ValueError without a token, in offline mode, for an invalid name, for an unknown or read-only token, and for a collection
    that does not exist.
    """
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or leave the push out")
    if get_token() is None:
        raise ValueError(
            "no Hugging Face token to push with: run `hf auth login` or set HF_TOKEN to one that may write"
        )
    if options.revision == "":
        raise ValueError("--revision is empty: name a branch, or leave it out for main")
    if why := ask_hub().why:
        raise ValueError(f"the Hub at {constants.ENDPOINT} does not answer: {why}")
    api = HfApi()
    try:
        # Few attempts: no work is done yet, and the user is waiting.
        account = patiently(api.whoami, f"asking {constants.ENDPOINT}", attempts=3)
    except Exception as error:  # the client's transports raise many types
        what = "did not accept the token" if status(error) in (401, 403) else "does not answer"
        raise ValueError(f"the Hub at {constants.ENDPOINT} {what}: {reason(error)}") from error
    if not options.dry_run and (account.get("auth") or {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(
            "this Hugging Face token may only read: make one that may write (https://huggingface.co/settings/tokens) and "
            "set HF_TOKEN to it, or run `hf auth login`"
        )
    name = repo or default_name
    repo_id = name if "/" in name else f"{account['name']}/{name}"
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"cannot push to {repo_id!r}: {reason(error)}; name it USER/NAME") from None
    if options.collection is not None:
        check_collection(api, options.collection)
    return repo_id


def push_folder(folder, repo_id, options, command):
    """Send the files of `folder` that `repo_id` lacks; the repository is created if needed.  Returns the address.

    options: PushOptions; with dry_run the plan is printed and nothing changes; command: the command that goes on, for the message.
    Raises ConnectionError with the Hub's answer; the folder is not changed.
    """
    api = HfApi()
    try:
        return _push(api, Path(folder), repo_id, options)
    except Exception as error:  # the client's transports raise many types; none may end in a traceback
        raise ConnectionError(
            f"could not push to {repo_id}: {reason(error)}{_advice(error)}. The export itself is complete in {folder}; once "
            f"that is mended, `{command}` sends what is missing"
        ) from error


def _push(api, folder, repo_id, options):
    info, has_branch = patiently(lambda: _ask(api, repo_id, options.revision), f"asking for {repo_id}")
    # An existing repository keeps its visibility, whatever create_repo is asked for.
    if info is not None and options.private and not info.private:
        raise ValueError("it exists already and is public, and --private was asked for")
    plan = plan_push(folder, info)
    branch = f", branch {options.revision}" if options.revision else ""
    if options.dry_run:
        _show(plan, repo_id, branch, info, has_branch, options)
        return f"{constants.ENDPOINT}/{repo_id}"
    if info is None:
        create = functools.partial(api.create_repo, repo_id, private=options.private, exist_ok=True)
        patiently(create, f"creating {repo_id}")
    if options.revision and not has_branch:
        create = functools.partial(api.create_branch, repo_id, branch=options.revision, exist_ok=True)
        patiently(create, f"creating the branch {options.revision}")

    missing = [file for file in plan if file.state != "there"]
    total = sum(file.size for file in missing)
    told = (
        f"sending {len(missing)} of {len(plan)} files, {in_bytes(total)}"
        if missing
        else f"all {len(plan)} files are there"
    )
    print(f"{told}: {repo_id}{branch}", flush=True)
    operations = [CommitOperationAdd(file.name, file.path) for file in missing]
    start, sent = time.monotonic(), 0
    for file, operation in zip(missing, operations):
        upload = functools.partial(
            api.preupload_lfs_files, repo_id, additions=[operation], revision=options.revision, free_memory=False
        )
        patiently(upload, f"sending {file.name}")
        sent += file.size
        if file.size >= WORTH_A_LINE and sent < total:
            minutes = (time.monotonic() - start) * (total - sent) / sent / 60
            left = f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"
            print(f"{in_bytes(sent)} of {in_bytes(total)} sent, {left} left", flush=True)

    def missing_now():
        return [file for file in plan_push(folder, _ask(api, repo_id, options.revision)[0]) if file.state != "there"]

    def commit():
        # Asked again, because an earlier attempt may have succeeded and only its answer was lost.
        if missing_now():
            api.create_commit(repo_id, operations, commit_message=MESSAGE, revision=options.revision)

    patiently(commit, "committing")
    if left := patiently(missing_now, f"asking for {repo_id}"):
        raise ValueError(f"the Hub took the commit and does not hold {left[0].name}: is it named in .gitignore there?")
    if options.collection is not None:
        print(f"in the collection {_add_to_collection(api, options.collection, repo_id, options.private)}")
    return f"{constants.ENDPOINT}/{repo_id}" + (f"/tree/{options.revision}" if options.revision else "")


def _ask(api, repo_id, revision):
    """(ModelInfo with the files' hashes, or None if there is no repository; whether the branch exists).

    A missing branch would be made from main, so the ModelInfo is then main's.
    """
    try:
        return api.model_info(repo_id, revision=revision, files_metadata=True), True
    except RevisionNotFoundError:
        return api.model_info(repo_id, files_metadata=True), False
    except RepositoryNotFoundError:
        return None, False


def plan_push(folder, info):
    """PlannedFiles of `folder`, in order; info: ModelInfo of the repository with metadata of files, None if it is empty.

    Hidden files are left out. Raises ValueError for weights or a tree in the repository that are not in the folder.
    """
    there = {file.rfilename: file for file in (info.siblings if info is not None else None) or ()}
    plan = []
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            held = there.get(name.as_posix())
            state = "new" if held is None else "there" if _is_same(path, held) else "changed"
            plan.append(PlannedFile(name.as_posix(), path, path.stat().st_size, state))
    foreign = sorted(name for name in there.keys() - {file.name for file in plan} if name.endswith(FOREIGN))
    if foreign:
        what = "other weights" if foreign[0].endswith(WEIGHTS) else "another head's tree"
        raise ValueError(
            f"it holds {what} already ({foreign[0]}), which a reader would mix with these: push to a new repository, "
            "or delete them there first"
        )
    return plan


def _is_same(path, held):
    """Whether a file has the bytes of a RepoSibling, which has the SHA-256 of large files and git's SHA-1 of others."""
    stat = path.stat()
    if held.size != stat.st_size:
        return False
    sha256, git = _digests(path, stat.st_size, stat.st_mtime_ns)
    return sha256 == held.lfs.sha256 if held.lfs is not None else git == held.blob_id


@functools.lru_cache
def _digests(path, size, time_ns):
    """(SHA-256, git's blob SHA-1) of a file, in hex. size and time (of its last change) only key the cache."""
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(2**22):
            sha256.update(block)
            git.update(block)
    return sha256.hexdigest(), git.hexdigest()


def check_collection(api, name):
    """ValueError for a slug that the Hub does not know. A title is accepted: its collection may be made later."""
    if not name.strip():
        raise ValueError("--collection is empty: name a slug (OWNER/NAME-ID) or a title")
    if "/" not in name:
        return
    try:
        patiently(lambda: api.get_collection(name), f"asking for the collection {name}", attempts=3)
    except HfHubHTTPError as error:
        if status(error) not in (401, 404):
            raise ValueError(f"the collection {name!r} cannot be read: {reason(error)}") from error
        raise ValueError(
            f"there is no collection {name!r}: give the slug that ends its address, or a title without / to have it made"
        ) from None


def _add_to_collection(api, name, repo_id, private):
    """Add the repository to a collection, made if the owner has none of this title.  Returns the collection's address."""
    owner, slug = repo_id.split("/")[0], name if "/" in name else None
    if slug is None:
        collections = patiently(lambda: list(api.list_collections(owner=owner)), f"asking for collections of {owner}")
        slug = next((one.slug for one in collections if one.title == name), None)
    if slug is None:
        create = functools.partial(api.create_collection, name, namespace=owner, private=private, exists_ok=True)
        slug = patiently(create, f"creating the collection {name}").slug
    add = functools.partial(api.add_collection_item, slug, repo_id, "model", exists_ok=True)
    patiently(add, f"adding to the collection {slug}")
    return f"{api.endpoint}/collections/{slug}"


def _show(plan, repo_id, branch, info, has_branch, options):
    """Print what a push would do."""
    kind = "private" if (info.private if info else options.private) else "public"
    print(f"{repo_id}{branch} ({kind}{'' if info else ', to be created'}), nothing is changed:")
    if info and not has_branch:
        print(f"  the branch {options.revision} would be made from main")
    doing = {"new": "send", "changed": "replace", "there": "there already"}
    for file in plan:
        print(f"  {doing[file.state]:<14}{in_bytes(file.size):>10}  {file.name}")
    missing = [file for file in plan if file.state != "there"]
    print(f"  to send: {len(missing)} of {len(plan)} files, {in_bytes(sum(file.size for file in missing))}")
    if options.collection is not None:
        print(f"  then to be added to the collection {options.collection}")


def in_bytes(count):
    """A number of bytes as text: 1.23 MB (10^6)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _advice(error):
    """Advice on a request that the Hub refused."""
    if status(error) == 401:
        return " (the token is not accepted: log in again with `hf auth login`, or set HF_TOKEN)"
    if status(error) == 403:
        return " (refused: the token needs the right to write there, and the account must have room)"
    return ""


def patiently(action, doing, attempts=None):
    """Repeat action() until it is answered.  doing: its name in a note; attempts: None for one more than PAUSES

    Raises the error of the last attempt; an error that another attempt would not change is raised at once.
    """
    pauses = PAUSES if attempts is None else PAUSES[: attempts - 1]
    for number, pause in enumerate(pauses, start=2):
        try:
            return action()
        except Exception as error:  # the client's transports raise many types
            if not may_pass(error):
                raise
            pause = max(pause, _wanted_wait(error))
            print(
                f"{doing}: {reason(error)}; attempt {number} of {len(pauses) + 1} in {pause:g} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(pause)
    return action()


def may_pass(error):
    """Whether the same request may succeed later: the connection broke, or the Hub was busy (408, 429, 5xx)."""
    for one in chain(error):
        if isinstance(one, HfHubHTTPError):
            return status(one) in (408, 429) or status(one) >= 500
        if isinstance(one, HTTPError | TimeoutError):  # from HTTP's transport
            return True
        if isinstance(one, ConnectionError):
            # hf_xet has one type for all errors of the storage; only its text has the status.
            return "status client error (" not in str(one) or "(429" in str(one) or "(408" in str(one)
    return False


def status(error):
    """The HTTP status of the Hub's refusal; 0 if there was no answer."""
    return next((one.response.status_code for one in chain(error) if isinstance(one, HfHubHTTPError)), 0)


def chain(error):
    """The error and its causes: uploads wrap the real error in one that only names the file."""
    while error is not None:
        yield error
        error = error.__cause__


def reason(error):
    """The reason of an error in one line: the Hub's answer, else the innermost wrapped error with a message."""
    errors = list(chain(error))
    answers = [one for one in errors if isinstance(one, HfHubHTTPError)]
    said = [" ".join(str(one).split()) for one in answers[:1] or reversed(errors)]
    return next((text for text in said if text), type(error).__name__)


def _wanted_wait(error):
    """Seconds that the answer asks to wait (Retry-After), 0 if it does not."""
    for one in chain(error):
        if isinstance(one, HfHubHTTPError):
            wanted = one.response.headers.get("Retry-After", "")
            return min(int(wanted), LONGEST_WAIT) if wanted.isdigit() else 0
    return 0
