//! The README's two commands share one build: both compile each dependency with the same features.
//!
//! `cargo run --release --example mnist` builds the root package, `cargo test --release --workspace` all of them. Cargo
//! unites features over what is built, so a feature that only another member asks for would compile Burn twice.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::shell;

/// The features of each dependency; one version may be built several times, as for a build script.
pub(super) type Features = BTreeMap<String, BTreeSet<String>>;

/// `selection` is a flag of cargo that selects packages.
pub(super) fn read(selection: &str) -> Result<Features> {
    let args = ["tree", "--locked", selection, "--edges=normal,build,dev", "--prefix=none", "--format={p}|{f}"];
    Ok(parse(&shell::output(&mut shell::command("cargo", &args))?))
}

pub(super) fn problems(root_package: &Features, workspace: &Features) -> Vec<String> {
    let differing = root_package.iter().filter_map(|(package, features)| {
        let of_workspace = workspace.get(package)?;
        (features != of_workspace).then(|| {
            format!("{package} is built twice: with {features:?} for the example, with {of_workspace:?} for all tests")
        })
    });
    differing.collect()
}

fn parse(tree: &str) -> Features {
    let mut features = Features::new();
    for line in tree.lines() {
        let line = line.trim_end_matches(" (*)");
        if let Some((package, list)) = line.split_once('|') {
            // A proc macro, and the path of a local package, follow the version.
            let package = package.split(" (").next().unwrap_or(package);
            features.entry(package.into()).or_default().insert(list.into());
        }
    }
    features
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "\
bonfire v0.1.0 (/bonfire)|
burn-flex v0.21.0|rayon,simd,std
serde v1.0.0|default,derive
serde_derive v1.0.0 (proc-macro)|default
serde v1.0.0|default,derive (*)
";

    #[test]
    fn the_same_features_are_no_problem() {
        let workspace = format!("{ROOT}\nxtask v0.1.0 (/bonfire/xtask)|\nflate2 v1.0.0|default\n");
        assert_eq!(problems(&parse(ROOT), &parse(&workspace)), [""; 0]);
    }

    #[test]
    fn a_feature_that_another_member_adds_is_a_problem() {
        let workspace = ROOT.replace("rayon,simd,std", "default,rayon,simd,std");
        let found = problems(&parse(ROOT), &parse(&workspace));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("burn-flex v0.21.0 is built twice"), "{found:?}");
    }
}
