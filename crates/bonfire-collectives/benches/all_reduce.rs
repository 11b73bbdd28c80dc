//! All-reduce between two threads against one thread's memcpy of the same size, measured in the same run.
//!
//! `cargo bench -p bonfire-collectives` prints a JSON line for each size and way. Every round measures all
//! three one after the other; a round does not count if the host took more than 5 % of the CPU time (steal in
//! `/proc/stat`) or a rank waited more than 5 % of the round for a core (`/proc/thread-self/schedstat`).
//! Ratios and times are medians over the rounds that count; without enough of those no goal is met.

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
const MAX_TIME: Duration = Duration::from_secs(60);
const MAX_TAKEN: f64 = 0.05;

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
        num_repeats: 20_000,
        shared: Goal::Micros(10.0),
        in_place: Goal::Micros(10.0),
    },
    Case { name: "1 MiB", num_bytes: 1 << 20, num_repeats: 500, shared: Goal::None, in_place: Goal::None },
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
    let started = Instant::now();
    loop {
        let before = Taken::so_far();
        let round = one_round(communicator, case, &pool, &mut buffer, &mut target)?;
        let mut taken = [Taken::so_far().share_since(&before)];
        communicator.all_reduce(BufferMut::from_slice(&mut taken), ReduceOp::Max)?;
        if taken[0] <= MAX_TAKEN {
            rounds.push(round);
        }
        let mut is_last = [u8::from(rounds.len() == NUM_ROUNDS || started.elapsed() > MAX_TIME)];
        communicator.broadcast(BufferMut::from_slice(&mut is_last), 0)?;
        if is_last == [1] {
            return Ok(rounds);
        }
    }
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

/// What others have taken from this thread so far.
struct Taken {
    at: Instant,
    /// Ticks of all cores, and those of them that the host took.
    ticks: u64,
    stolen_ticks: u64,
    /// Ready to run, but without a core.
    waited: Duration,
}

impl Taken {
    /// All zero where there is no `/proc`, so that every round counts.
    fn so_far() -> Self {
        let numbers = |path: &str| -> Vec<u64> {
            let text = fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().next().unwrap_or_default();
            line.split_whitespace().filter_map(|field| field.parse().ok()).collect()
        };
        // user nice system idle iowait irq softirq steal; guest time is part of user.
        let ticks = numbers("/proc/stat");
        // Nanoseconds on a core, nanoseconds waiting for one, number of slices.
        let nanos = numbers("/proc/thread-self/schedstat");
        Self {
            at: Instant::now(),
            ticks: ticks.iter().take(8).sum(),
            stolen_ticks: ticks.get(7).copied().unwrap_or(0),
            waited: Duration::from_nanos(nanos.get(1).copied().unwrap_or(0)),
        }
    }

    /// The larger of the shares that the host and other threads took.
    fn share_since(&self, before: &Self) -> f64 {
        let ticks = self.ticks.saturating_sub(before.ticks).max(1);
        let stolen = self.stolen_ticks.saturating_sub(before.stolen_ticks) as f64 / ticks as f64;
        let waited = self.waited.saturating_sub(before.waited).as_secs_f64();
        stolen.max(waited / (self.at - before.at).as_secs_f64())
    }
}
