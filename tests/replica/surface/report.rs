//! docs/OPS.md: what each method does with a sharded input, as seen on two members.

use std::{collections::BTreeSet, fmt::Write as _, path::Path};

use bonfire::{
    Placement, Replica, Shares,
    collectives::{Collective, Tally},
};
use burn::tensor::backend::Backend;
use burn_flex::Flex;

use super::{
    METHODS, all_cases,
    case::{Any, Args, Case, Expected, Of, Rule},
    placing::{Bench, Place, placement},
};
use crate::runs::draw_alone;

const HEAD: &str = "\
# Operations

What every method of Burn's backend traits does on two members with one input sharded and the others at home. Written by
`cargo xtask ops` from what was seen; a test compares it.

\"0 -> dim 0\" says: with this input sharded on its dim 0, the result is sharded on its dim 0. \"gathers\": the input is
gathered and every member runs the operation whole. A *sum* (or max, or min) stays in parts, *whole* is on every member,
*home* on the calling thread, *host* was read, a *fill* is one value without storage. Collectives are named where there
are any. Where several inputs can be sharded, they are numbered.
";

/// The whole page.
pub fn page() -> String {
    let cases: Vec<Case<Replica<Flex>>> = all_cases();
    let mut page = HEAD.to_string();
    page.push_str("\n| rule | why |\n|---|---|\n");
    let mut rules: Vec<Rule> = Vec::new();
    for case in &cases {
        if !rules.contains(&case.spec.rule) {
            rules.push(case.spec.rule);
        }
    }
    for Rule { name, why } in rules {
        writeln!(page, "| {name} | {why} |").unwrap();
    }
    let bench = Bench::new(2, Shares::Equal);
    let traits: Vec<&str> = METHODS.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let mut seen = BTreeSet::new();
    for name in traits.into_iter().filter(|name| seen.insert(*name)) {
        write!(page, "\n## {name}\n\n| method | rule | sharded input -> result |\n|---|---|---|\n").unwrap();
        let of_trait = METHODS.lines().filter_map(|line| line.strip_prefix(name)).map(str::trim);
        for method in of_trait {
            for case in cases.iter().filter(|case| case.method == method) {
                let note = if case.spec.note.is_empty() { String::new() } else { format!(" ({})", case.spec.note) };
                writeln!(page, "| `{method}`{note} | {} | {} |", case.spec.rule.name, outcomes(case, &bench)).unwrap();
            }
        }
    }
    page
}

/// Compares the page with the file, or writes it if the environment says so.
pub fn check(page: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/OPS.md");
    if std::env::var_os("BONFIRE_WRITE_OPS").is_some() {
        std::fs::create_dir_all(path.parent().expect("it lies in docs")).unwrap();
        std::fs::write(&path, page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let differs =
        |(index, (now, then)): (usize, (&str, &str))| (now != then).then(|| format!("line {}: {now}", index + 1));
    let difference = page.lines().zip(written.lines()).enumerate().find_map(differs);
    assert!(page == written, "docs/OPS.md is stale, run `cargo xtask ops`: {difference:?}");
}

/// By input and its sharded dim.
fn outcomes(case: &Case<Replica<Flex>>, bench: &Bench) -> String {
    let inputs = &case.spec.variants[0];
    if case.spec.expected == Expected::Panic {
        return "none".into();
    }
    let can_shard =
        |index: usize| inputs[index].dtype != Of::Quantized && inputs[index].shape.iter().any(|&length| length > 1);
    let sharded: Vec<usize> = (0..inputs.len()).filter(|&index| can_shard(index)).collect();
    if sharded.is_empty() {
        let all_local = vec![Place::Local; inputs.len()];
        return outcome(case, bench, &all_local);
    }
    let by_input = sharded.iter().map(|&index| {
        let dims = (0..inputs[index].shape.len()).filter(|&dim| inputs[index].shape[dim] > 1);
        let by_dim: Vec<String> = dims
            .map(|dim| {
                let mut places = vec![Place::Local; inputs.len()];
                places[index] = Place::Shard(dim);
                format!("{dim} -> {}", outcome(case, bench, &places))
            })
            .collect();
        let number = if sharded.len() > 1 { format!("#{} ", index + 1) } else { String::new() };
        format!("{number}{:?}: {}", inputs[index].shape, by_dim.join(", "))
    });
    by_input.collect::<Vec<_>>().join("; ")
}

fn outcome(case: &Case<Replica<Flex>>, bench: &Bench, places: &[Place]) -> String {
    let (dtype, inputs) = (case.spec.dtypes[0], &case.spec.variants[0]);
    let _alone = (case.spec.expected == Expected::Drawn).then(draw_alone);
    let device = &bench.device;
    let placed = inputs.iter().zip(places).map(|(input, &place)| bench.place(input, dtype, place)).collect();
    Replica::<Flex>::sync(device).unwrap();
    let before = device.collectives().tally();
    let mut args = Args { device: device.clone(), elsewhere: device.clone(), dtype, inputs: placed };
    let results = (case.call)(&mut args);
    Replica::<Flex>::sync(device).unwrap();
    let collectives = names(device.collectives().tally() - before);
    let mut kinds: Vec<String> = results.iter().map(kind).collect();
    kinds.dedup();
    match kinds.join(" and ") {
        kinds if kinds == "whole" && collectives.contains("exchange") => "gathers".into(),
        kinds => kinds + &collectives,
    }
}

fn kind(result: &Any<Replica<Flex>>) -> String {
    match placement(result) {
        None => "host".into(),
        Some(Placement::Local) => "home".into(),
        Some(Placement::Fill) => "fill".into(),
        Some(Placement::Replicate) => "whole".into(),
        Some(Placement::Shard { dim, .. }) => format!("dim {dim}"),
        Some(Placement::Partial { op }) => op.to_string(),
    }
}

fn names(tally: Tally) -> String {
    let called = Collective::ALL.into_iter().filter(|&collective| tally.num_calls(collective) > 0);
    let names: Vec<String> = called.map(|collective| collective.to_string()).collect();
    if names.is_empty() { String::new() } else { format!(" by {}", names.join(", ")) }
}
