//! The conformance suite over MPI, in as many processes as mpirun starts: `cargo xtask mpi`.
//!
//! Every process runs this program. A check that fails ends its process with a status that has mpirun end the others.

use std::{cell::Cell, num::NonZeroUsize, panic, process, time::Duration};

use bonfire_collectives::{
    BufferMut, Communicator, DType, GroupBackend, MpiCommunicator, MpiTransport, MpiWorld, ProcessGroup,
    ProcessGroupOptions, ReduceOp,
    conformance::{self, BREAKING, RESULTS, oracle},
};

fn main() {
    if let Err(panic) = panic::catch_unwind(run) {
        // The message is out; without this mpirun would wait for the others.
        drop(panic);
        process::exit(1);
    }
}

fn run() {
    let world = MpiWorld::join().expect("MPI starts");
    let num_groups = Cell::new(0);
    let group = |timeout| {
        num_groups.set(num_groups.get() + 1);
        let transport = MpiTransport::new(&world, &format!("check {}", num_groups.get())).expect("all ranks come");
        MpiCommunicator::new(transport, timeout)
    };
    let between = group(Duration::from_secs(60));
    let start = |_: NonZeroUsize, timeout: Duration, program: &(dyn Fn(&dyn Communicator) + Sync)| {
        let communicator = group(timeout);
        program(&communicator);
        drop(communicator);
        between.barrier().expect("all ranks are done with the check");
    };
    let world_size = NonZeroUsize::new(world.world_size()).expect("a world has ranks");
    conformance::run(RESULTS, world_size, &start);
    conformance::run(BREAKING, world_size, &start);
    native_sum(&world);
    process_group(world.rank(), world.world_size());
    if world.rank() == 0 {
        println!("mpi: {world_size} ranks keep to the contract, in {} groups", num_groups.get());
    }
}

/// Sums of whole numbers are exact in any order.
fn native_sum(world: &MpiWorld) {
    let transport = MpiTransport::new(world, "native").expect("all ranks come").with_native_sum(true);
    let communicator = MpiCommunicator::new(transport, Duration::from_secs(60));
    let (rank, world_size) = (world.rank(), world.world_size());
    for (op, divisor) in [(ReduceOp::Sum, 1), (ReduceOp::Mean, world_size)] {
        let mut values: Vec<f32> = (0..1_000_000).map(|index| ((index % 1000 + rank) * world_size) as f32).collect();
        communicator.all_reduce(BufferMut::from_slice(&mut values), op).expect("it is summed");
        let rest = world_size * world_size * (world_size - 1) / 2;
        let expected = |index: usize| (index % 1000 * world_size * world_size + rest) / divisor;
        assert!(values.iter().enumerate().all(|(index, &value)| value == expected(index) as f32), "{op}");
    }
    // What MPI does not sum as we do is formed as ever.
    let mut bytes = oracle::values(1, rank, DType::BF16, 100_000);
    let view = BufferMut::new(DType::BF16, &mut bytes).expect("whole");
    communicator.all_reduce(view, ReduceOp::Max).expect("it is reduced");
}

fn process_group(rank: usize, world_size: usize) {
    // Without mpirun there are no variables: one rank, and MPI must be asked for.
    let backend = if world_size == 1 { GroupBackend::Mpi } else { GroupBackend::Auto };
    let group = ProcessGroup::new(&ProcessGroupOptions::default().with_backend(backend)).expect("all ranks come");
    assert_eq!((group.rank(), group.world_size()), (rank, world_size));
    let norm = group.new_communicator("norm").expect("all ranks come");
    let mut sum = [1u32];
    norm.all_reduce(BufferMut::from_slice(&mut sum), ReduceOp::Sum).expect("all ranks come");
    assert_eq!(sum, [world_size as u32]);
    assert!(group.new_communicator("norm").is_err(), "a name is used once");
    group.communicator().barrier().expect("all ranks come");
}
