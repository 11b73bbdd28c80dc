//! The methods of Burn's backend traits, from Burn's source, and the page that says what each does.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::shell;

/// Read by the tests of the backend.
const METHODS: &str = "tests/replica/surface/methods.txt";

/// The traits, and where `burn-backend` has them.
const TRAITS: &[(&str, &str)] = &[
    ("FloatTensorOps", "tensor.rs"),
    ("IntTensorOps", "int_tensor.rs"),
    ("BoolTensorOps", "bool_tensor.rs"),
    ("ModuleOps", "modules/base.rs"),
    ("ActivationOps", "activation.rs"),
    ("QTensorOps", "qtensor.rs"),
    ("TransactionOps", "transaction.rs"),
];

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Ops {
    /// Only fail if the list of methods is not Burn's
    #[arg(long)]
    check: bool,
}

impl Ops {
    /// The list alone, without writing.
    pub(crate) const CHECK: Self = Self { check: true };
}

/// Writes the list of methods and docs/OPS.md, or checks the list (the tests check the page).
pub(crate) fn run(args: &Ops) -> Result<()> {
    let list = list()?;
    let path = shell::root().join(METHODS);
    if args.check {
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        ensure!(written == list, "{METHODS} is not what burn-backend has; run `cargo xtask ops`");
        println!("{} methods, as in {METHODS}", list.lines().count());
        return Ok(());
    }
    std::fs::write(&path, list).with_context(|| format!("cannot write {METHODS}"))?;
    let test = ["test", "--release", "--workspace", "--test", "replica", "the_table_of_operations"];
    shell::run(shell::command("cargo", &test).env("BONFIRE_WRITE_OPS", "1"))
}

/// `FloatTensorOps float_add`, a line each, in Burn's order.
fn list() -> Result<String> {
    let ops = burn_backend()?.join("src/backend/ops");
    let mut list = String::new();
    for (name, file) in TRAITS {
        let path = ops.join(file);
        let source = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let methods = methods(&source, name);
        ensure!(!methods.is_empty(), "{} holds no method of {name}", path.display());
        methods.iter().try_for_each(|method| writeln!(list, "{name} {method}"))?;
    }
    Ok(list)
}

/// The folder of the crate that the workspace is built with.
fn burn_backend() -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        manifest_path: PathBuf,
    }

    let text = shell::output(&mut shell::command("cargo", &["metadata", "--format-version=1", "--locked"]))?;
    let metadata: Metadata = serde_json::from_str(&text).context("cargo metadata prints JSON")?;
    let mut found = metadata.packages.iter().filter(|package| package.name == "burn-backend");
    let package = found.next().context("the workspace depends on burn-backend")?;
    ensure!(found.next().is_none(), "the workspace depends on two versions of burn-backend");
    Ok(package.manifest_path.parent().unwrap_or(Path::new("")).to_path_buf())
}

/// Names of the functions that a trait declares, by a look at its lines: those of the trait are indented by one step,
/// bodies by more.
fn methods(source: &str, name: &str) -> Vec<String> {
    let start = format!("pub trait {name}<");
    let lines = source.lines().skip_while(|line| !line.starts_with(&start)).take_while(|line| *line != "}");
    let declared = lines.filter_map(|line| {
        let line = line.strip_prefix("    ")?;
        let rest = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ")?;
        rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next()
    });
    declared.map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_those_of_the_trait_and_not_what_their_bodies_or_others_hold() {
        let source = "\
pub trait Other<B> {
    fn other();
}

pub trait Ops<B: Backend> {
    /// fn in_a_comment
    fn first(x: X) -> X;
    fn second(
        x: X,
    ) -> X {
        fn inner() {}
        inner();
    }
    async fn third<T>() -> T;
}

fn after() {}
";
        assert_eq!(methods(source, "Ops"), ["first", "second", "third"]);
        assert_eq!(methods(source, "Missing"), [""; 0]);
    }

    #[test]
    fn burns_traits_are_found() {
        let list = list().unwrap();
        for method in ["FloatTensorOps float_add", "ModuleOps conv2d", "TransactionOps tr_execute"] {
            assert!(list.lines().any(|line| line == method), "{method}");
        }
        assert!(list.lines().count() > 400);
    }
}
