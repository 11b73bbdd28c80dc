//! Which crates may depend on which: the map of ARCHITECTURE.md, and nothing else.

use anyhow::Result;
use serde::Deserialize;

use crate::shell;

/// Each crate with what it may depend on among ours and Burn's; `?` marks what must stay optional.
const EDGES: &[(&str, &[&str])] = &[
    ("bonfire-placement", &[]),
    ("bonfire-collectives", &[]),
    ("bonfire-kernels", &["burn-backend", "burn-cubecl?"]),
    (
        "bonfire-replica",
        &[
            "bonfire-placement",
            "bonfire-collectives",
            "burn-backend",
            "burn-flex",
            "burn-cubecl?",
            "burn-ir?",
            "burn-ndarray?",
            "burn-wgpu?",
        ],
    ),
    ("bonfire-train", &["bonfire-placement", "bonfire-collectives", "bonfire-kernels", "burn"]),
    ("bonfire", &["bonfire-placement", "bonfire-collectives", "bonfire-kernels", "bonfire-replica", "bonfire-train"]),
    ("bonfire-tests", &["burn"]),
    ("xtask", &[]),
];

/// A crate of the workspace, as `cargo metadata` describes it.
#[derive(Debug, Deserialize)]
pub(super) struct Crate {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    /// Unset for a normal dependency.
    kind: Option<String>,
    optional: bool,
}

pub(super) fn read() -> Result<Vec<Crate>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Crate>,
    }
    let args = ["metadata", "--format-version", "1", "--no-deps"];
    let metadata: Metadata = serde_json::from_str(&shell::output(&mut shell::command("cargo", &args))?)?;
    Ok(metadata.packages)
}

pub(super) fn problems(crates: &[Crate]) -> Vec<String> {
    crates.iter().flat_map(crate_problems).collect()
}

fn crate_problems(of: &Crate) -> Vec<String> {
    let Some((_, allowed)) = EDGES.iter().find(|(name, _)| *name == of.name) else {
        return vec![format!("crate {} is not in the map of crates: see EDGES in xtask/src/tidy/edges.rs", of.name)];
    };
    // Tests may use anything; they do not reach a user.
    let lasting = of.dependencies.iter().filter(|dependency| dependency.kind.as_deref() != Some("dev"));
    lasting
        .filter(|dependency| is_ours(&dependency.name) || is_burn(&dependency.name))
        .filter_map(|dependency| {
            let name = &dependency.name;
            let may_be_optional = allowed.contains(&format!("{name}?").as_str());
            match (allowed.contains(&name.as_str()), may_be_optional, dependency.optional) {
                (true, _, _) | (false, true, true) => None,
                (false, true, false) => Some(format!("{} -> {name} must be optional", of.name)),
                (false, false, _) => Some(format!("{} -> {name} is not an edge of the map of crates", of.name)),
            }
        })
        .collect()
}

fn is_ours(name: &str) -> bool {
    name == "xtask" || name == "bonfire" || name.starts_with("bonfire-")
}

fn is_burn(name: &str) -> bool {
    name == "burn" || name.starts_with("burn-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crate_with(name: &str, dependencies: &[(&str, Option<&str>, bool)]) -> Crate {
        let dependency = |&(name, kind, optional): &(&str, Option<&str>, bool)| Dependency {
            name: name.into(),
            kind: kind.map(String::from),
            optional,
        };
        Crate { name: name.into(), dependencies: dependencies.iter().map(dependency).collect() }
    }

    #[test]
    fn the_edges_of_the_map_are_allowed() {
        let replica = [
            ("bonfire-placement", None, false),
            ("bonfire-collectives", None, false),
            ("burn-backend", None, false),
            ("burn-flex", None, false),
            ("burn-ndarray", None, true),
            ("rayon", None, false),
            ("burn", Some("dev"), false),
        ];
        assert_eq!(problems(&[crate_with("bonfire-replica", &replica)]), [""; 0]);
        assert_eq!(problems(&[crate_with("bonfire", &[("bonfire-replica", None, false)])]), [""; 0]);
    }

    #[test]
    fn any_other_edge_is_a_problem() {
        for (from, to) in [
            ("bonfire-placement", "bonfire-collectives"),
            ("bonfire-placement", "burn-backend"),
            ("bonfire-collectives", "burn-std"),
            ("bonfire-replica", "bonfire-train"),
            ("bonfire-train", "bonfire-replica"),
            ("bonfire", "burn"),
            ("xtask", "bonfire"),
        ] {
            let found = problems(&[crate_with(from, &[(to, None, false)])]);
            assert_eq!(found, [format!("{from} -> {to} is not an edge of the map of crates")]);
            assert_eq!(problems(&[crate_with(from, &[(to, Some("build"), true)])]).len(), 1);
        }
    }

    #[test]
    fn a_heavy_backend_must_stay_optional() {
        for backend in ["burn-ndarray", "burn-wgpu"] {
            let found = problems(&[crate_with("bonfire-replica", &[(backend, None, false)])]);
            assert_eq!(found, [format!("bonfire-replica -> {backend} must be optional")]);
            assert_eq!(problems(&[crate_with("bonfire-replica", &[(backend, None, true)])]), [""; 0]);
        }
    }

    #[test]
    fn a_crate_that_nobody_planned_is_a_problem() {
        assert!(problems(&[crate_with("bonfire-extras", &[])])[0].contains("bonfire-extras is not in the map"));
    }
}
