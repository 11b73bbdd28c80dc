//! All-reduce between two processes against `MPI_SUM` called bare, measured in the same run.
//!
//! `cargo bench -p bonfire-collectives --features mpi --bench processes` starts itself with mpirun, and prints a JSON line
//! for each size and way. Every round measures all ways one after the other; ratios and times are medians over rounds, low
//! and high bound the median ratio with 95 %. Bare MPI reads one buffer and writes another, all others work in place.
//!
//! malloc keeps the memory that it has once got: Open MPI takes a temporary buffer for every call, and at 64 MiB it would
//! otherwise spend a third of its time on fresh pages, which no one who tunes MPI puts up with.

use std::{
    env,
    error::Error,
    hint::black_box,
    num::NonZeroUsize,
    process::{Command, ExitCode},
    sync::Arc,
    time::{Duration, Instant},
};

use bonfire_collectives::{
    BufferMut, CollectiveError, Communicator, GroupBackend, MpiCommunicator, MpiTransport, MpiWorld, ProcessGroup,
    ProcessGroupOptions, ReduceOp, run_ranks,
};
use mpi::{collective::SystemOperation, topology::SimpleCommunicator, traits::CommunicatorCollectives as _};

const NUM_ROUNDS: usize = 15;
/// Of 15 values, the 4th and the 12th bound the median with at least 95 %, whatever their distribution.
const LOW: usize = 3;

/// One size of buffer, how often to repeat within a round, and how much slower than bare MPI sums in rank order may be.
struct Case {
    name: &'static str,
    num_bytes: usize,
    num_repeats: usize,
    goal: Option<f64>,
}

const CASES: [Case; 6] = [
    Case { name: "8 B", num_bytes: 8, num_repeats: 1000, goal: None },
    Case { name: "1 KiB", num_bytes: 1 << 10, num_repeats: 1000, goal: None },
    Case { name: "64 KiB", num_bytes: 64 << 10, num_repeats: 200, goal: None },
    Case { name: "1 MiB", num_bytes: 1 << 20, num_repeats: 50, goal: None },
    Case { name: "16 MiB", num_bytes: 16 << 20, num_repeats: 4, goal: None },
    Case { name: "64 MiB", num_bytes: 64 << 20, num_repeats: 2, goal: Some(1.5) },
];

/// The ways, the baseline first.
const WAYS: [&str; 5] = ["MPI_SUM called bare", "over MPI", "over MPI, by MPI_SUM", "over TCP", "between threads"];

fn main() -> Result<ExitCode, Box<dyn Error>> {
    if env::var_os("OMPI_COMM_WORLD_SIZE").is_none() {
        let mut mpirun = Command::new("mpirun");
        mpirun.args(["-n", "2"]).arg(env::current_exe()?);
        mpirun.env("MALLOC_MMAP_THRESHOLD_", (2u64 << 30).to_string());
        mpirun.env("MALLOC_TRIM_THRESHOLD_", (4u64 << 30).to_string());
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        return Ok(if mpirun.status()?.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let world = MpiWorld::join()?;
    let options = ProcessGroupOptions::default().with_backend(GroupBackend::Tcp);
    let tcp = ProcessGroup::new(&options)?;
    let mpi = over_mpi(&world, "bench", false)?;
    let native = over_mpi(&world, "bench native", true)?;
    for case in &CASES {
        let num_elements = case.num_bytes / size_of::<f32>();
        let mut buffers = Buffers { values: vec![1.0; num_elements], sums: vec![1.0; num_elements] };
        let mut rounds = Vec::new();
        for round in 0..=NUM_ROUNDS {
            let seconds = one_round(case, &mut buffers, &tcp, &*mpi, &*native)?;
            // The first one warms up.
            if round > 0 {
                rounds.push(seconds);
            }
        }
        if tcp.rank() == 0 {
            report(case, &rounds);
        }
    }
    tcp.communicator().barrier()?;
    Ok(ExitCode::SUCCESS)
}

fn over_mpi(world: &MpiWorld, name: &str, native_sum: bool) -> Result<Arc<dyn Communicator>, Box<dyn Error>> {
    let transport = MpiTransport::new(world, name)?.with_native_sum(native_sum);
    Ok(Arc::new(MpiCommunicator::new(transport, Duration::from_secs(60))))
}

/// Buffers that every way uses, so that no page is faulted in while the clock runs.
struct Buffers {
    values: Vec<f32>,
    sums: Vec<f32>,
}

/// Seconds per repeat, by way.
fn one_round(
    case: &Case,
    buffers: &mut Buffers,
    tcp: &ProcessGroup,
    mpi: &dyn Communicator,
    native: &dyn Communicator,
) -> Result<[f64; WAYS.len()], CollectiveError> {
    let Buffers { values, sums } = buffers;
    values.fill(tcp.rank() as f32);
    sums.fill(0.0);
    let world = SimpleCommunicator::world();
    world.barrier();
    let started = Instant::now();
    for _ in 0..case.num_repeats {
        world.all_reduce_into(black_box(&values[..]), &mut sums[..], SystemOperation::sum());
    }
    let bare = started.elapsed().as_secs_f64() / case.num_repeats as f64;
    assert!(sums.iter().all(|&sum| sum == 1.0), "0 and 1 have the sum 1");
    let tcp_communicator = tcp.communicator();
    let mut seconds = [bare, 0.0, 0.0, 0.0, 0.0];
    for (way, communicator) in [(1, mpi), (2, native), (3, &*tcp_communicator)] {
        seconds[way] = timed(communicator, case, values)?;
    }
    if tcp.rank() == 0 {
        let two = NonZeroUsize::MIN.saturating_add(1);
        let threads = run_ranks(two, Duration::from_secs(60), |communicator| {
            timed(&communicator, case, &mut vec![1f32; case.num_bytes / size_of::<f32>()])
        });
        seconds[4] = threads.into_iter().next().unwrap_or(Ok(f64::NAN))?;
    }
    tcp_communicator.barrier()?;
    Ok(seconds)
}

fn timed(communicator: &dyn Communicator, case: &Case, values: &mut [f32]) -> Result<f64, CollectiveError> {
    // Means stay within bounds, where sums would grow without end; after the first one all ranks have the same.
    values.fill(2.0 * communicator.rank() as f32);
    communicator.barrier()?;
    let started = Instant::now();
    for _ in 0..case.num_repeats {
        communicator.all_reduce(BufferMut::from_slice(black_box(&mut *values)), ReduceOp::Mean)?;
    }
    let seconds = started.elapsed().as_secs_f64() / case.num_repeats as f64;
    assert!(values.iter().all(|&value| value == 1.0), "0 and 2 have the mean 1");
    Ok(seconds)
}

fn report(case: &Case, rounds: &[[f64; WAYS.len()]]) {
    for (way, name) in WAYS.iter().enumerate() {
        let micros = sorted(rounds.iter().map(|round| round[way] * 1e6))[NUM_ROUNDS / 2];
        let ratios = sorted(rounds.iter().map(|round| round[way] / round[0]));
        let (ratio, low, high) = (ratios[NUM_ROUNDS / 2], ratios[LOW], ratios[NUM_ROUNDS - 1 - LOW]);
        // For sums in rank order between processes.
        let goal = case.goal.filter(|_| way == 1 || way == 3);
        let ok = goal.is_none_or(|goal| ratio <= goal);
        let goal = goal.map_or("null".into(), |goal| format!("\"{goal} x MPI_SUM\""));
        println!(
            "{{\"name\":\"all_reduce {name}, {}\",\"ratio\":{ratio:.3},\"low\":{low:.3},\"high\":{high:.3},\
             \"micros\":{micros:.3},\"goal\":{goal},\"ok\":{ok}}}",
            case.name
        );
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}
