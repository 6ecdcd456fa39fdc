"""A Hub without a network: repositories that `HfApi` creates and commits to are in memory, and in a cache from which they load."""

from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, RepoUrl, constants, get_token


TOKEN = "hf_nobody"  # the one that may write


class Hub:
    """
    Has `repos` (name → path → content), `commits` (the paths that each adds), `states` (path → content of the repository after
    each), `revisions` (the branch of each), and, while `is_full` is set, no room left.
    """

    def __init__(self, cache):
        self.cache = Path(cache)
        self.repos, self.commits, self.states, self.revisions = {}, [], [], []
        self.is_full = False

    def create_repo(self, api, repo_id, token=None, **options):
        if (token or get_token()) != TOKEN:
            raise PermissionError(f"You have no rights to create {repo_id}")
        self.repos.setdefault(repo_id, {})
        return RepoUrl(f"{constants.ENDPOINT}/{repo_id}")

    def list_repo_files(self, api, repo_id, **options):
        return list(self.repos[repo_id])

    def create_commit(self, api, repo_id, operations, **options):
        if self.is_full:
            raise OSError("The storage is full")
        files, added = self.repos[repo_id], []
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                with operation.as_file() as file:
                    files[operation.path_in_repo] = file.read()
                added.append(operation.path_in_repo)
            else:
                del files[operation.path_in_repo]
        self.commits.append(sorted(added))
        self.states.append(dict(files))
        self.revisions.append(options.get("revision"))
        return self._store(repo_id, files, options)

    def _store(self, repo_id, files, options):
        """Puts a new version of a repository into the cache, where loading looks without a network."""
        folder, version = self.cache / f"models--{repo_id.replace('/', '--')}", f"{len(self.commits):040}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(version)
        for name, content in files.items():
            path = folder / "snapshots" / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        url = f"{constants.ENDPOINT}/{repo_id}/commit/{version}"
        return CommitInfo(url, commit_message=options["commit_message"], commit_description="", oid=version)


def use_hub(monkeypatch, cache):
    """The Hub of this process, with a token that may write; repositories load from the folder `cache`."""
    hub = Hub(cache)
    for name in ("create_repo", "list_repo_files", "create_commit"):
        method = getattr(hub, name)
        monkeypatch.setattr(HfApi, name, lambda api, *args, method=method, **options: method(api, *args, **options))
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *args, **options: None)  # the Hub's server does it
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which uploads without `create_commit`
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub
