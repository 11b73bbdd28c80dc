//! Two ranks that are processes, each with one thread for its tensors, against two processes that know nothing of each other.
//!
//! Rank 0 measures; it tells rank 1 before each run what that is to run with it.

use std::{
    env,
    process::{Child, Command},
    sync::Arc,
    time::Instant,
};

use bonfire::collectives::{BufferMut, Communicator, LaunchConfig, ProcessGroup};

use crate::{
    contenders::{Contender, free, ranks_of},
    rounds::{Goal, Rounds},
    subjects::{Cnn, Mlp, Subject},
};

/// What rank 1 is told to do when a figure is measured.
const END: u8 = u8::MAX;

/// Whether this process is one of those that [`start`] has started.
pub fn is_rank() -> bool {
    LaunchConfig::from_env().is_ok_and(|config| config.world_size().get() > 1)
}

/// Starts this program as two ranks, with mpirun where they are to talk over MPI.
pub fn start() {
    let program = env::current_exe().expect("this program");
    let mut children: Vec<Child> = if cfg!(feature = "mpi") {
        let mut mpirun = Command::new("mpirun");
        // Each process may use both cores, as those that are started without mpirun.
        mpirun.args(["-n", "2", "--bind-to", "none"]).arg(program);
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        vec![mpirun.spawn().expect("Open MPI is installed")]
    } else {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = port.expect("a free port").port().to_string();
        let rank = |rank: &str| {
            let mut command = Command::new(&program);
            command.env("RANK", rank).env("LOCAL_RANK", rank).env("WORLD_SIZE", "2");
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            command.spawn().expect("this program starts")
        };
        vec![rank("0"), rank("1")]
    };
    for child in &mut children {
        assert!(child.wait().expect("a child").success(), "a rank failed");
    }
}

/// What each of the two ranks does.
pub fn run_rank() {
    let group = ProcessGroup::from_env().expect("the ranks meet");
    scaling::<Cnn>(&group, "CNN, batch 64", 64, 5, Goal::AtLeast(0.85));
    scaling::<Cnn>(&group, "CNN, batch 256", 256, 2, Goal::AtLeast(0.85));
    scaling::<Mlp>(&group, "MLP, batch 256", 256, 30, Goal::AtLeast(0.65));
}

fn scaling<S: Subject>(group: &ProcessGroup, name: &str, batch_size: usize, num_steps: usize, goal: Goal) {
    let steps = group.new_communicator(name).expect("the ranks meet");
    let contenders: Vec<Contender> = vec![
        free::<S>(1, batch_size / 2, num_steps),
        ranks_of::<S>(vec![steps], batch_size, num_steps),
        if group.rank() == 0 { free::<S>(1, batch_size, num_steps) } else { Box::new(|| 0.0) },
    ];
    let ranks = group.communicator();
    if group.rank() > 0 {
        return follow(&*ranks, contenders);
    }
    let contenders = contenders.into_iter().zip(0..).map(|(run, index)| lead(ranks.clone(), run, index, num_steps));
    let rounds = Rounds::measure(contenders.collect());
    tell(&*ranks, END);
    let over = if cfg!(feature = "mpi") { "MPI" } else { "TCP" };
    rounds.report(&format!("{name}: rate of 2 ranks over {over} over two free processes"), 0, 1, goal);
    rounds.report(&format!("{name}: rate of 2 ranks over {over} over one process"), 2, 1, Goal::None);
}

/// Runs a contender together with rank 1; its time is that of the slower one.
fn lead(ranks: Arc<dyn Communicator>, mut run: Contender, index: u8, num_steps: usize) -> Contender {
    Box::new(move || {
        tell(&*ranks, index);
        let begin = Instant::now();
        run();
        ranks.barrier().expect("rank 1 ends too");
        begin.elapsed().as_secs_f64() / num_steps as f64
    })
}

fn follow(ranks: &dyn Communicator, mut contenders: Vec<Contender>) {
    loop {
        let mut told = [END];
        ranks.broadcast(BufferMut::from_slice(&mut told), 0).expect("rank 0 leads");
        let Some(run) = contenders.get_mut(usize::from(told[0])) else { return };
        run();
        ranks.barrier().expect("rank 0 ends too");
    }
}

fn tell(ranks: &dyn Communicator, what: u8) {
    ranks.broadcast(BufferMut::from_slice(&mut [what]), 0).expect("rank 1 follows");
}
