//! Rounds that count, and what they say.

use std::{
    fs,
    time::{Duration, Instant},
};

use crate::contenders::Contender;

const NUM_ROUNDS: usize = 30;
const MAX_TIME: Duration = Duration::from_secs(120);
const MAX_STEAL: f64 = 0.05;

#[derive(Clone, Copy)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
    None,
}

/// Seconds of each contender, in each round that counts.
pub struct Rounds(Vec<Vec<f64>>);

impl Rounds {
    /// Measures until enough rounds count, or time is up.
    pub fn measure(mut contenders: Vec<Contender>) -> Self {
        // Warm up: the first steps make threads, memory and optimizer state.
        for _ in 0..3 {
            for run in &mut contenders {
                run();
            }
        }
        let (mut rounds, start) = (Vec::new(), Instant::now());
        while rounds.len() < NUM_ROUNDS && start.elapsed() < MAX_TIME {
            let before = CpuTime::now();
            let round: Vec<f64> = contenders.iter_mut().map(|run| run()).collect();
            if before.steal_until(&CpuTime::now()) <= MAX_STEAL {
                rounds.push(round);
            }
        }
        Self(rounds)
    }

    /// Prints the ratio of two contenders' times.
    pub fn report(&self, name: &str, numerator: usize, denominator: usize, goal: Goal) {
        let ratios = self.0.iter().map(|round| round[numerator] / round[denominator]).collect();
        let millis = median(self.0.iter().map(|round| round[denominator] * 1e3).collect());
        print_figure(name, "ratio", ratios, goal, &format!(",\"millis\":{millis:.3}"));
    }

    /// Prints one contender's time.
    pub fn report_micros(&self, name: &str, contender: usize, goal: Goal) {
        print_figure(name, "micros", self.0.iter().map(|round| round[contender] * 1e6).collect(), goal, "");
    }
}

/// Prints a ratio that was measured once.
pub fn print_value(name: &str, ratio: f64, goal: Goal) {
    print_figure(name, "ratio", vec![ratio; NUM_ROUNDS], goal, "");
}

/// Memory that the process has, from the system; not a number where that does not tell.
pub fn resident_bytes() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map_or(f64::NAN, |kib: f64| kib * 1024.0)
}

fn print_figure(name: &str, unit: &str, mut values: Vec<f64>, goal: Goal, more: &str) {
    values.sort_by(f64::total_cmp);
    let (low, high) = interval(&values);
    let (goal, ok) = match goal {
        Goal::AtMost(goal) => (format!("{goal}"), low <= goal),
        Goal::AtLeast(goal) => (format!("{goal}"), high >= goal),
        Goal::None => ("null".into(), true),
    };
    let ok = ok && values.len() >= NUM_ROUNDS;
    let (rounds, middle) = (values.len(), median(values));
    println!(
        "{{\"name\":\"{name}\",\"{unit}\":{middle:.3},\"low\":{low:.3},\"high\":{high:.3},\"goal\":{goal},\"ok\":{ok},\"rounds\":{rounds}{more}}}"
    );
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The 95 % interval of the median, by order statistics of the sorted values (normal approximation of the binomial).
fn interval(sorted: &[f64]) -> (f64, f64) {
    let num = sorted.len() as f64;
    let reach = 0.98 * num.sqrt();
    let at = |index: f64| sorted.get(index.max(0.0) as usize).or(sorted.last()).copied().unwrap_or(f64::NAN);
    (at(num / 2.0 - reach), at(num / 2.0 + reach))
}

/// CPU time of the whole machine, in ticks.
struct CpuTime {
    all: f64,
    stolen: f64,
}

impl CpuTime {
    /// Zeros where the system does not tell.
    fn now() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let first = stat.lines().next().unwrap_or_default();
        let ticks: Vec<f64> = first.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
        Self { all: ticks.iter().take(8).sum(), stolen: ticks.get(7).copied().unwrap_or(0.0) }
    }

    fn steal_until(&self, later: &Self) -> f64 {
        (later.stolen - self.stolen) / (later.all - self.all).max(1.0)
    }
}
