//! All-reduce between two threads against one thread's memcpy of the same size, measured in the same run.
//!
//! `cargo bench -p bonfire-collectives` prints a JSON line for each size and way. Every round measures all
//! three one after the other; a round during which the host (steal) or other processes took more than 5 %
//! of the CPU time (`/proc/stat`) does not count. Ratios and times are medians over the rounds that do;
//! without enough of those a goal is not met.

use std::{
    fs,
    hint::black_box,
    num::NonZeroUsize,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bonfire_collectives::{BufferMut, CollectiveError, Communicator, DType, ReduceOp, ThreadCommunicator, run_ranks};

const NUM_ROUNDS: usize = 30;
const MAX_ROUNDS: usize = 150;
const MAX_DISTURBANCE: f64 = 0.05;

/// One size of buffer: how often to repeat within a round, and what to reach.
struct Case {
    name: &'static str,
    num_bytes: usize,
    num_repeats: usize,
    shared: Goal,
    in_place: Goal,
}

#[derive(Clone, Copy)]
enum Goal {
    Ratio(f64),
    Micros(f64),
    None,
}

const CASES: [Case; 3] = [
    Case {
        name: "4 KiB",
        num_bytes: 4 << 10,
        num_repeats: 4000,
        shared: Goal::Micros(10.0),
        in_place: Goal::Micros(10.0),
    },
    Case { name: "1 MiB", num_bytes: 1 << 20, num_repeats: 100, shared: Goal::None, in_place: Goal::None },
    Case { name: "64 MiB", num_bytes: 64 << 20, num_repeats: 4, shared: Goal::Ratio(1.5), in_place: Goal::Ratio(2.5) },
];

/// Seconds per repeat in one round.
struct Round {
    memcpy: f64,
    shared: f64,
    in_place: f64,
}

fn main() -> Result<(), CollectiveError> {
    let world_size = NonZeroUsize::MIN.saturating_add(1);
    for case in CASES {
        let rounds = run_ranks(world_size, Duration::from_secs(60), |communicator| measure(&communicator, &case));
        let rounds = rounds.into_iter().next().unwrap_or_else(|| Ok(Vec::new()))?;
        report(&format!("memcpy, {}", case.name), &rounds, |round| round.memcpy, Goal::None);
        report(&format!("all_reduce shared, {}", case.name), &rounds, |round| round.shared, case.shared);
        report(&format!("all_reduce in place, {}", case.name), &rounds, |round| round.in_place, case.in_place);
    }
    Ok(())
}

/// The rounds that count, on rank 0.
fn measure(communicator: &ThreadCommunicator, case: &Case) -> Result<Vec<Round>, CollectiveError> {
    let pool = Pool::filled(3, case.num_bytes);
    let mut buffer = vec![1u8; case.num_bytes];
    let mut target = vec![2u8; case.num_bytes];
    // One round to warm up, then those that may count.
    one_round(communicator, case, &pool, &mut buffer, &mut target)?;
    let mut rounds = Vec::new();
    for _ in 0..MAX_ROUNDS {
        let before = CpuTime::now();
        let round = one_round(communicator, case, &pool, &mut buffer, &mut target)?;
        let mut go_on = [1u8];
        if communicator.rank() == 0 {
            if CpuTime::now().disturbance_since(&before) <= MAX_DISTURBANCE {
                rounds.push(round);
            }
            go_on[0] = u8::from(rounds.len() < NUM_ROUNDS);
        }
        communicator.broadcast(BufferMut::from_slice(&mut go_on), 0)?;
        if go_on[0] == 0 {
            break;
        }
    }
    Ok(rounds)
}

fn one_round(
    communicator: &ThreadCommunicator,
    case: &Case,
    pool: &Pool,
    buffer: &mut [u8],
    target: &mut [u8],
) -> Result<Round, CollectiveError> {
    let memcpy = timed(communicator, case, || {
        if communicator.rank() == 0 {
            target.copy_from_slice(black_box(buffer));
            black_box(&mut *target);
        }
        Ok(())
    })?;
    let shared = timed(communicator, case, || {
        let results = communicator.all_reduce_shared(vec![pool.take()], &[DType::F32], ReduceOp::Mean)?;
        black_box(results);
        Ok(())
    })?;
    let in_place =
        timed(communicator, case, || communicator.all_reduce(BufferMut::new(DType::F32, buffer)?, ReduceOp::Mean))?;
    Ok(Round { memcpy, shared, in_place })
}

fn timed(
    communicator: &ThreadCommunicator,
    case: &Case,
    mut call: impl FnMut() -> Result<(), CollectiveError>,
) -> Result<f64, CollectiveError> {
    communicator.barrier()?;
    let started = Instant::now();
    for _ in 0..case.num_repeats {
        call()?;
    }
    Ok(started.elapsed().as_secs_f64() / case.num_repeats as f64)
}

fn report(name: &str, rounds: &[Round], seconds: impl Fn(&Round) -> f64, goal: Goal) {
    let num_rounds = rounds.len();
    let micros = median(rounds.iter().map(|round| seconds(round) * 1e6));
    let ratio = median(rounds.iter().map(|round| seconds(round) / round.memcpy));
    let (goal, is_met) = match goal {
        Goal::Ratio(goal) => (format!("\"{goal} x memcpy\""), ratio.is_some_and(|ratio| ratio <= goal)),
        Goal::Micros(goal) => (format!("\"{goal} us\""), micros.is_some_and(|micros| micros <= goal)),
        Goal::None => ("null".to_owned(), true),
    };
    let ok = is_met && num_rounds >= NUM_ROUNDS;
    let number = |value: Option<f64>| value.map_or("null".to_owned(), |value| format!("{value:.3}"));
    let (ratio, micros) = (number(ratio), number(micros));
    println!(
        "{{\"name\":\"{name}\",\"ratio\":{ratio},\"micros\":{micros},\"rounds\":{num_rounds},\
         \"goal\":{goal},\"ok\":{ok}}}"
    );
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Buffers that come back when dropped, so that no page is faulted in while the clock runs.
#[derive(Clone)]
struct Pool(Arc<Mutex<Vec<Box<[u8]>>>>);

impl Pool {
    fn filled(num_buffers: usize, num_bytes: usize) -> Self {
        let buffers = (0..num_buffers).map(|_| vec![1; num_bytes].into_boxed_slice()).collect();
        Self(Arc::new(Mutex::new(buffers)))
    }

    fn take(&self) -> Pooled {
        let bytes = self.0.lock().expect("no holder panics").pop();
        Pooled { bytes: bytes.expect("at most two buffers are out"), pool: self.clone() }
    }
}

struct Pooled {
    bytes: Box<[u8]>,
    pool: Pool,
}

impl Deref for Pooled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Pooled {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Ok(mut free) = self.pool.0.lock() {
            free.push(core::mem::take(&mut self.bytes));
        }
    }
}

/// CPU time since the start, in ticks: of the machine, of that stolen by the host, of this process.
#[derive(Default)]
struct CpuTime {
    total: u64,
    busy: u64,
    steal: u64,
    own: u64,
}

impl CpuTime {
    /// All zero where there is no `/proc`, so that every round counts.
    fn now() -> Self {
        let numbers = |text: &str| -> Vec<u64> { text.split_whitespace().filter_map(|n| n.parse().ok()).collect() };
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let process = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // user nice system idle iowait irq softirq steal; guest time is part of user.
        let machine = numbers(stat.lines().next().unwrap_or_default());
        // After the name in parentheses and the state, utime and stime are the 11th and 12th numbers.
        let own = numbers(process.rsplit(')').next().unwrap_or_default());
        let (&[user, nice, system, idle, iowait, irq, softirq, steal, ..], Some(own)) = (&machine[..], own.get(10..12))
        else {
            return Self::default();
        };
        let busy = user + nice + system + irq + softirq;
        Self { total: busy + idle + iowait + steal, busy, steal, own: own.iter().sum() }
    }

    /// The share of the machine's time that went to others than this process.
    fn disturbance_since(&self, before: &Self) -> f64 {
        let [total, busy, steal, own] = [|t: &Self| t.total, |t: &Self| t.busy, |t: &Self| t.steal, |t: &Self| t.own]
            .map(|of| of(self) - of(before));
        (busy.saturating_sub(own) + steal) as f64 / total.max(1) as f64
    }
}
