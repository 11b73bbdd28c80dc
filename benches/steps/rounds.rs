//! Rounds that count, and what they say.

use std::{
    fs,
    time::{Duration, Instant},
};

use crate::contenders::Contender;

const NUM_ROUNDS: usize = 30;
const MAX_TIME: Duration = Duration::from_secs(120);
/// Of contenders whose round takes longer than `LONG_ROUND`.
const NUM_LONG_ROUNDS: usize = 6;
const LONG_ROUND: Duration = Duration::from_secs(10);
const MAX_TIME_OF_LONG: Duration = Duration::from_secs(480);
const MAX_STEAL: f64 = 0.05;

#[derive(Clone, Copy)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
    None,
}

/// What was measured.
pub struct Rounds {
    /// Seconds of each contender, in each round that counts.
    seconds: Vec<Vec<f64>>,
    /// Rounds that a figure needs.
    needed: usize,
}

impl Rounds {
    /// Measures until enough rounds count, or time is up.
    pub fn measure(mut contenders: Vec<Contender>) -> Self {
        // Warm up: the first steps make threads, memory and optimizer state.
        let begin = Instant::now();
        for run in &mut contenders {
            run();
        }
        let (needed, max_time) = match begin.elapsed() > LONG_ROUND {
            true => (NUM_LONG_ROUNDS, MAX_TIME_OF_LONG),
            false => {
                for run in &mut contenders {
                    run();
                    run();
                }
                (NUM_ROUNDS, MAX_TIME)
            }
        };
        let (mut seconds, start) = (Vec::new(), Instant::now());
        while seconds.len() < needed && start.elapsed() < max_time {
            let before = CpuTime::now();
            let round: Vec<f64> = contenders.iter_mut().map(|run| run()).collect();
            if before.steal_until(&CpuTime::now()) <= MAX_STEAL {
                seconds.push(round);
            }
        }
        Self { seconds, needed }
    }

    /// Prints the ratio of two contenders' times.
    pub fn report(&self, name: &str, numerator: usize, denominator: usize, goal: Goal) {
        let ratios = self.seconds.iter().map(|round| round[numerator] / round[denominator]).collect();
        let millis = median(self.seconds.iter().map(|round| round[denominator] * 1e3).collect());
        print_figure(name, "ratio", ratios, self.needed, goal, &format!(",\"millis\":{millis:.3}"));
    }

    /// Prints one contender's time.
    pub fn report_micros(&self, name: &str, contender: usize, goal: Goal) {
        let micros = self.seconds.iter().map(|round| round[contender] * 1e6).collect();
        print_figure(name, "micros", micros, self.needed, goal, "");
    }
}

/// Prints a ratio that was measured once.
pub fn print_value(name: &str, ratio: f64, goal: Goal) {
    print_figure(name, "ratio", vec![ratio], 1, goal, "");
}

/// Memory that the process has, from the system; not a number where that does not tell.
pub fn resident_bytes() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map_or(f64::NAN, |kib: f64| kib * 1024.0)
}

fn print_figure(name: &str, unit: &str, mut values: Vec<f64>, needed: usize, goal: Goal, more: &str) {
    values.sort_by(f64::total_cmp);
    let (low, high) = interval(&values);
    let (goal, ok) = match goal {
        Goal::AtMost(goal) => (format!("{goal}"), low <= goal),
        Goal::AtLeast(goal) => (format!("{goal}"), high >= goal),
        Goal::None => ("null".into(), true),
    };
    let ok = ok && values.len() >= needed;
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
