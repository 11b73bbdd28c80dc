//! What no compiler checks: that the project keeps its own rules.
//!
//! Each check is a pure function from what was read to a list of problems.

mod code_map;
mod edges;
mod files;
mod shared_build;

use anyhow::{Context, Result, bail};

use crate::ci::FEATURE_PACKAGES;
use crate::shell;

/// Runs all checks, prints every problem, and fails if there is one.
pub(crate) fn run() -> Result<()> {
    let files = tracked_files()?;
    let architecture = std::fs::read_to_string(shell::root().join("ARCHITECTURE.md")).unwrap_or_default();

    let mut problems = edges::problems(&edges::read()?);
    problems.extend(files::problems(&files, |path| std::fs::read_to_string(shell::root().join(path)).ok()));
    problems.extend(code_map::problems(&architecture, &files));
    problems
        .extend(shared_build::problems(&shared_build::read("--package=bonfire")?, &shared_build::read("--workspace")?));

    problems.extend(stale_locks());

    for problem in &problems {
        eprintln!("tidy: {problem}");
    }
    if !problems.is_empty() {
        bail!("{} of the project's rules are broken, see above", problems.len());
    }
    println!("{} files, no problem", files.len());
    Ok(())
}

/// Feature packages whose lock does not fit what the crates depend on: a fresh clone would not fetch them.
fn stale_locks() -> Vec<String> {
    let is_stale = |name: &&str| {
        let manifest = format!("tests/{name}/Cargo.toml");
        let args = ["metadata", "-q", "--locked", "--format-version", "1", "--manifest-path", &manifest];
        shell::output(&mut shell::command("cargo", &args)).is_err()
    };
    let stale = FEATURE_PACKAGES.into_iter().filter(is_stale);
    stale.map(|name| format!("tests/{name}/Cargo.lock is out of date: `cd tests/{name} && cargo metadata`")).collect()
}

/// Files that git knows or would add, relative to the root, with `/` between the parts.
fn tracked_files() -> Result<Vec<String>> {
    // A clone that belongs to another user is no danger here: nothing of it is run by git.
    let args = ["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let list = shell::output(&mut shell::command("git", &args)).context("tidy needs git and a clone")?;
    let mut files: Vec<String> = list.split('\0').filter(|path| !path.is_empty()).map(String::from).collect();
    files.retain(|path| shell::root().join(path).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}
