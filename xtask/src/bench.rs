//! `cargo xtask bench`: the figures behind the claims, and their table in benches/RESULTS.md.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Deserialize;

use crate::shell::{command, output, root};

/// Where results are kept, from the root.
const RESULTS: &str = "benches/RESULTS.md";

/// Groups of figures.
const GROUPS: [&str; 20] = [
    "collectives",
    "processes",
    "train",
    "steps",
    "cnn",
    "mlp",
    "tiny",
    "controller",
    "memory",
    "shares",
    "soak",
    "resnet",
    "transformer",
    "gpt",
    "lenet",
    "unet",
    "lstm",
    "gru",
    "vae",
    "autoencoder",
];

#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// Group of figures, one of those below; steps: all but collectives, processes and train; processes needs Open MPI [default: all but processes]
    #[arg(value_parser = GROUPS)]
    name: Option<String>,
    /// Append the figures to benches/RESULTS.md, with date, commit and command
    #[arg(long)]
    record: bool,
}

/// One line of a bench: a figure with its goal.
#[derive(Debug, Deserialize)]
struct Figure {
    name: String,
    ratio: Option<f64>,
    micros: Option<f64>,
    mib: Option<f64>,
    low: Option<f64>,
    high: Option<f64>,
    /// A number or, for goals of several units, a text.
    goal: serde_json::Value,
    ok: bool,
}

pub(crate) fn run(bench: &Bench) -> Result<()> {
    let mut figures = Vec::new();
    for arguments in commands(bench.name.as_deref()) {
        figures.extend(measure(&arguments).with_context(|| format!("cargo {}", arguments.join(" ")))?);
    }
    ensure!(!figures.is_empty(), "the benches printed no figure");
    if bench.record {
        let today = output(&mut command("date", &["+%F"]))?;
        let commit = output(&mut command("git", &["log", "-1", "--format=%h"]))?;
        let name = bench.name.as_deref().map(|name| format!(" {name}")).unwrap_or_default();
        let title = format!("{}, commit {}, `cargo xtask bench{name}`", today.trim(), commit.trim());
        let mut results = std::fs::OpenOptions::new().append(true).open(root().join(RESULTS))?;
        results.write_all(table(&title, &figures).as_bytes()).with_context(|| format!("cannot write {RESULTS}"))?;
    }
    let missed: Vec<&str> = figures.iter().filter(|figure| !figure.ok).map(|figure| figure.name.as_str()).collect();
    if !missed.is_empty() {
        bail!("goals missed, or too few rounds counted on a busy machine: {}", missed.join("; "));
    }
    Ok(())
}

/// The arguments of cargo for a group of figures.
fn commands(name: Option<&str>) -> Vec<Vec<&str>> {
    let collectives = vec!["bench", "-q", "-p", "bonfire-collectives", "--bench", "all_reduce"];
    let steps = vec!["bench", "-q", "-p", "bonfire", "--bench", "steps"];
    let train = vec!["bench", "-q", "-p", "bonfire", "--bench", "train"];
    match name {
        None => vec![collectives, train, steps],
        Some("collectives") => vec![collectives],
        Some("processes") => {
            let package = |name, bench| vec!["bench", "-q", "-p", name, "--features", "mpi", "--bench", bench];
            let ranks = [package("bonfire", "train"), vec!["--", "processes"]].concat();
            vec![package("bonfire-collectives", "processes"), ranks]
        }
        Some("train") => vec![train],
        Some("steps") => vec![steps],
        Some(group) => vec![[steps, vec!["--", group]].concat()],
    }
}

/// Runs one bench; shows its lines as they come.
fn measure(arguments: &[&str]) -> Result<Vec<Figure>> {
    let mut child = command("cargo", arguments).stdout(Stdio::piped()).spawn()?;
    let lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
    let mut figures = Vec::new();
    for line in lines {
        let line = line?;
        println!("{line}");
        if line.starts_with('{') {
            figures.push(serde_json::from_str(&line).with_context(|| format!("not a figure: {line}"))?);
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "failed: {status}");
    Ok(figures)
}

/// A section of RESULTS.md.
fn table(title: &str, figures: &[Figure]) -> String {
    let mut text = format!("\n## {title}\n\n| figure | median | 95 % interval | goal | met |\n|---|---|---|---|---|\n");
    for figure in figures {
        let value = match (figure.ratio, figure.micros, figure.mib) {
            (Some(ratio), _, Some(mib)) => format!("{ratio:.3} ({mib:.2} MiB)"),
            (Some(ratio), Some(micros), None) => format!("{ratio:.2} ({micros:.1} us)"),
            (Some(ratio), None, None) => format!("{ratio:.2}"),
            (None, Some(micros), _) => format!("{micros:.2} us"),
            (None, None, _) => "none".into(),
        };
        let interval = match (figure.low, figure.high) {
            (Some(low), Some(high)) => format!("{low:.2} to {high:.2}"),
            _ => String::new(),
        };
        let (goal, met) = match &figure.goal {
            serde_json::Value::Null => (String::new(), ""),
            serde_json::Value::String(goal) => (goal.clone(), if figure.ok { "yes" } else { "no" }),
            goal => (goal.to_string(), if figure.ok { "yes" } else { "no" }),
        };
        text += &format!("| {} | {value} | {interval} | {goal} | {met} |\n", figure.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_become_rows_with_their_goals() {
        let lines = [
            r#"{"name":"a","ratio":1.25,"micros":3.0,"rounds":30,"goal":"1.5 x memcpy","ok":true}"#,
            r#"{"name":"b","ratio":0.9,"low":0.8,"high":0.95,"goal":0.92,"ok":false,"rounds":30,"millis":5.0}"#,
            r#"{"name":"c","micros":0.9,"low":0.8,"high":1.0,"goal":null,"ok":true,"rounds":30}"#,
            r#"{"name":"d","ratio":0.5,"mib":12.25,"goal":0.525,"ok":true}"#,
        ];
        let figures: Vec<Figure> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let text = table("today", &figures);
        assert!(text.contains("| a | 1.25 (3.0 us) |  | 1.5 x memcpy | yes |"), "{text}");
        assert!(text.contains("| b | 0.90 | 0.80 to 0.95 | 0.92 | no |"), "{text}");
        assert!(text.contains("| c | 0.90 us | 0.80 to 1.00 |  |  |"), "{text}");
        assert!(text.contains("| d | 0.500 (12.25 MiB) |  | 0.525 | yes |"), "{text}");
    }

    #[test]
    fn every_group_runs_the_bench_that_has_it() {
        assert_eq!(commands(None).len(), 3);
        assert!(commands(Some("collectives"))[0].contains(&"bonfire-collectives"));
        assert_eq!(commands(Some("tiny"))[0].last(), Some(&"tiny"));
    }
}
