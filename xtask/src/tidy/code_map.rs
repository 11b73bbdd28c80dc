//! The code map in ARCHITECTURE.md names every crate and every module file, and nothing that is not there.
//!
//! The map is the section whose heading contains "Code map". A path in it is written from the root, or from the crate
//! named last: at the start of a line or heading (`bonfire-placement`), or as a path (`crates/bonfire-placement`).

use std::collections::BTreeSet;

/// `files` are all files of the repository.
pub(super) fn problems(architecture: &str, files: &[String]) -> Vec<String> {
    let Some(section) = section(architecture) else {
        return vec!["ARCHITECTURE.md needs a section with the heading \"Code map\"".into()];
    };
    let (mentioned, mut problems) = mentions(&section, files);
    let missing = expected(files).into_iter().filter(|path| !mentioned.contains(path));
    problems.extend(missing.map(|path| format!("the code map in ARCHITECTURE.md does not mention {path}")));
    problems
}

/// The lines from the heading to the next one of its level or above.
fn section(architecture: &str) -> Option<String> {
    let level = |line: &str| line.bytes().take_while(|&byte| byte == b'#').count();
    let is_start = |line: &&str| level(line) > 0 && line.to_lowercase().contains("code map");
    let mut lines = architecture.lines().skip_while(|line| !is_start(line));
    let heading = lines.next()?;
    let mut in_fence = false;
    let body = lines.take_while(|line| {
        in_fence ^= line.trim_start().starts_with("```");
        // In a fenced block a line may start with # without being a heading.
        in_fence || level(line) == 0 || level(line) > level(heading)
    });
    Some(body.collect::<Vec<_>>().join("\n"))
}

/// Folders of crates, and the modules on the top level of each `src`: what the map has to mention.
fn expected(files: &[String]) -> BTreeSet<String> {
    let crates = crate_folders(files);
    let mut expected: BTreeSet<String> = crates.iter().map(|folder| folder.to_string()).collect();
    for path in files.iter().filter(|path| path.starts_with("crates/")) {
        let in_src = crates.iter().find_map(|folder| path.strip_prefix(folder)?.strip_prefix("/src/"));
        match in_src.map(|module| module.split_once('/')) {
            // A module with a file of its own; lib.rs is the crate.
            Some(None) if path.ends_with(".rs") && !path.ends_with("/lib.rs") => expected.insert(path.clone()),
            // A module that is a folder.
            Some(Some((_, "mod.rs"))) => expected.insert(path.trim_end_matches("/mod.rs").into()),
            Some(_) | None => false,
        };
    }
    expected
}

/// `xtask` and the folders under `crates/`.
fn crate_folders(files: &[String]) -> Vec<&str> {
    let manifests = files.iter().filter_map(|path| path.strip_suffix("/Cargo.toml"));
    manifests.filter(|folder| *folder == "xtask" || folder.starts_with("crates/")).collect()
}

/// What the section mentions, and the paths in it that lead nowhere.
fn mentions(section: &str, files: &[String]) -> (BTreeSet<String>, Vec<String>) {
    let crates = crate_folders(files);
    let (mut mentioned, mut problems) = (BTreeSet::new(), Vec::new());
    let mut current = "";
    for line in section.lines() {
        for (i, word) in words(line).enumerate() {
            let word = word.trim_end_matches('/');
            let named = crates.iter().find(|folder| match word.strip_prefix(**folder) {
                Some(rest) => rest.is_empty() || rest.starts_with('/'),
                None => i == 0 && folder.rsplit('/').next() == Some(word),
            });
            if let Some(folder) = named {
                current = folder;
                mentioned.insert(folder.to_string());
            }
        }
        for path in words(line).filter(|word| is_path(word)) {
            let found = resolve(path.trim_end_matches('/'), current, files);
            if found.is_empty() {
                problems.push(format!("ARCHITECTURE.md: the code map mentions {path}, which does not exist"));
            }
            // Who names a file of a module that is a folder names the module.
            mentioned.extend(found.iter().filter_map(|path| Some(path.rsplit_once('/')?.0.to_string())));
            mentioned.extend(found);
        }
    }
    (mentioned, problems)
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|c: char| !(c.is_ascii_alphanumeric() || "_-./*".contains(c)));
    words
        .map(|word| word.trim_end_matches('.').trim_start_matches("./"))
        .filter(|word| word.contains(char::is_alphanumeric))
}

fn is_path(word: &str) -> bool {
    const ROOTS: &[&str] = &["crates/", "src/", "examples/", "tests/", "benches/", "xtask/", ".ci/", ".cargo/"];
    let is_file = [".rs", ".toml", ".md", ".lock"].iter().any(|end| word.ends_with(end) && word != *end);
    let is_rooted = ROOTS.iter().any(|root| word.starts_with(root));
    (is_file || is_rooted || word.ends_with('/')) && !word.contains('*') && !word.starts_with('/')
}

/// The path itself, or files and folders of the current crate that end in it.
fn resolve(path: &str, current: &str, files: &[String]) -> Vec<String> {
    let starts = |file: &str, folder: &str| {
        file.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if files.iter().any(|file| starts(file, path)) {
        return vec![path.into()];
    }
    let in_crate = files.iter().filter(|file| current.is_empty() || starts(file, current));
    let ends = in_crate.filter_map(|file| {
        let (at, _) = file.match_indices(path).find(|&(at, found)| {
            let rest = &file[at + found.len()..];
            file[..at].ends_with('/') && (rest.is_empty() || rest.starts_with('/'))
        })?;
        Some(file[..at + path.len()].to_string())
    });
    ends.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> Vec<String> {
        [
            "ARCHITECTURE.md",
            "Cargo.toml",
            "crates/bonfire-a/Cargo.toml",
            "crates/bonfire-a/src/error.rs",
            "crates/bonfire-a/src/lib.rs",
            "crates/bonfire-a/src/rules.rs",
            "crates/bonfire-a/src/rules/conv.rs",
            "crates/bonfire-b/Cargo.toml",
            "crates/bonfire-b/src/error.rs",
            "crates/bonfire-b/src/lib.rs",
            "crates/bonfire-b/src/ops/float.rs",
            "crates/bonfire-b/src/ops/mod.rs",
            "examples/mnist/main.rs",
            "xtask/Cargo.toml",
            "xtask/src/main.rs",
        ]
        .map(String::from)
        .to_vec()
    }

    const GOOD: &str = "\
# Architecture
Nothing here counts: `missing.rs`.
## Code map
Paths like crates/*/src are no paths, and neither is and/or.
### `crates/bonfire-a`
- `error.rs`: what goes wrong.
- `rules.rs`: see `rules/`, one file each, as `conv.rs`. Used by `bonfire-b`, whose main type is `lib.rs`.
- `lib.rs`
```text
# comment
bonfire-b
  src/error.rs   the same for b
  ops/           operations
```
`xtask` and `examples/mnist` (`examples/mnist/main.rs`).
## Other
`gone.rs`
";

    #[test]
    fn a_map_of_everything_has_no_problem() {
        assert_eq!(problems(GOOD, &files()), [""; 0]);
    }

    #[test]
    fn a_file_is_mentioned_only_under_its_own_crate() {
        let found = problems(&GOOD.replace("  src/error.rs", "  errors"), &files());
        assert_eq!(found, ["the code map in ARCHITECTURE.md does not mention crates/bonfire-b/src/error.rs"]);
        let found = problems(&GOOD.replace("- `error.rs`", "- errors"), &files());
        assert_eq!(found, ["the code map in ARCHITECTURE.md does not mention crates/bonfire-a/src/error.rs"]);
    }

    #[test]
    fn a_module_that_is_a_folder_is_mentioned_by_its_name_or_by_a_file_in_it() {
        assert_eq!(problems(&GOOD.replace("  ops/ ", "  src/ops/float.rs "), &files()), [""; 0]);
        let found = problems(&GOOD.replace("  ops/ ", "  ops "), &files());
        assert_eq!(found, ["the code map in ARCHITECTURE.md does not mention crates/bonfire-b/src/ops"]);
    }

    #[test]
    fn a_crate_that_is_not_mentioned_is_a_problem() {
        let found = problems(&GOOD.replace("`xtask`", "chores"), &files());
        assert_eq!(found, ["the code map in ARCHITECTURE.md does not mention xtask"]);
    }

    #[test]
    fn a_path_that_leads_nowhere_is_a_problem() {
        for gone in ["- `gone.rs`", "- `crates/bonfire-c`", "- `rules/gone/`", "- `ules.rs`", "- src/rules"] {
            let found = problems(&GOOD.replace("- `lib.rs`", gone), &files());
            let expected = usize::from(gone != "- src/rules");
            assert_eq!(found.len(), expected, "{gone}: {found:?}");
        }
    }

    #[test]
    fn a_document_without_a_map_is_a_problem() {
        assert_eq!(problems("# Architecture\n", &files()).len(), 1);
        assert_eq!(problems("", &files()).len(), 1);
    }
}
