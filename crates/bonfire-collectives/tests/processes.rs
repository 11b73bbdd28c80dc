//! Ranks that are processes: this test program, started again with the variables of a launcher.

use std::{
    env,
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{BufferMut, CollectiveError, ProcessGroup, ProcessGroupOptions, ReduceOp};

/// What a started rank does.
const PROGRAM: &str = "BONFIRE_TEST_PROGRAM";
/// Variables that a launcher of the test itself may have set.
const LAUNCHER_VARIABLES: &[&str] = &[
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_JOB_ID",
];

struct Rank {
    process: Child,
    stdout: BufReader<ChildStdout>,
}

impl Rank {
    fn start(program: &str, variables: &[(&str, String)]) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "a_rank_of_another_test", "--ignored", "--nocapture"]);
        for variable in LAUNCHER_VARIABLES {
            command.env_remove(variable);
        }
        command.env(PROGRAM, program).envs(variables.iter().cloned()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        Self { process, stdout }
    }

    /// Reads on until a line with `text`.
    fn wait_for(&mut self, text: &str) -> String {
        let mut line = String::new();
        while self.stdout.read_line(&mut line).unwrap() > 0 {
            if line.contains(text) {
                return line;
            }
            line.clear();
        }
        panic!("the rank ended without saying {text:?}");
    }

    fn finish(mut self) -> String {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).unwrap();
        assert!(self.process.wait().unwrap().success(), "{text}");
        text
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Most often it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn torchrun(rank: usize, world_size: usize, port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", world_size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.to_string()),
    ]
}

fn open_mpi(rank: usize, world_size: usize, job: &str) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", world_size.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", world_size.to_string()),
        ("PMIX_NAMESPACE", job.into()),
    ]
}

#[test]
#[ignore = "a rank that other tests start"]
fn a_rank_of_another_test() {
    match env::var(PROGRAM).expect("started by another test").as_str() {
        "sum" => sum(),
        "until broken" => until_broken(),
        other => panic!("no program {other}"),
    }
}

fn sum() {
    // The variables of Open MPI are there without it: no backend may rely on more than them.
    let options = ProcessGroupOptions::default().with_backend(bonfire_collectives::GroupBackend::Tcp);
    let group = ProcessGroup::new(&options).unwrap();
    let norm = group.new_communicator("norm").unwrap();
    for num_elements in [1, 1_000_000] {
        for communicator in [group.communicator(), norm.clone()] {
            let mut values = vec![group.rank() as f32 + 1.0; num_elements];
            communicator.all_reduce(BufferMut::from_slice(&mut values), ReduceOp::Sum).unwrap();
            let total = group.world_size() * (group.world_size() + 1) / 2;
            assert!(values.iter().all(|&value| value == total as f32));
        }
    }
    group.store().add("done", 1).unwrap();
    group.communicator().barrier().unwrap();
    println!("rank {} of {} is done", group.rank(), group.world_size());
}

fn until_broken() {
    let group = ProcessGroup::new(&ProcessGroupOptions::default().with_timeout(Duration::from_secs(60))).unwrap();
    let communicator = group.communicator();
    communicator.barrier().unwrap();
    println!("ready");
    let error = loop {
        let result = communicator.all_reduce(BufferMut::from_slice(&mut vec![1f32; 100_000]), ReduceOp::Sum);
        if let Err(error) = result {
            break error;
        }
    };
    let CollectiveError::Broken { cause, .. } = error else { panic!("{error}") };
    println!("broken: {cause}");
}

fn all_are_done(ranks: Vec<Rank>) {
    for (rank, process) in ranks.into_iter().enumerate() {
        let text = process.finish();
        assert!(text.contains(&format!("rank {rank} of 2 is done")), "{text}");
    }
}

#[test]
fn processes_with_the_variables_of_torchrun_are_a_group() {
    let port = free_port();
    all_are_done((0..2).map(|rank| Rank::start("sum", &torchrun(rank, 2, port))).collect());
}

#[test]
fn processes_with_the_variables_of_open_mpi_are_a_group() {
    let job = format!("test-{}-{}", std::process::id(), free_port());
    all_are_done((0..2).map(|rank| Rank::start("sum", &open_mpi(rank, 2, &job))).collect());
}

/// CASES 38
#[test]
fn two_jobs_on_one_machine_do_not_meet_at_one_port() {
    let job = |name: &str| format!("test-{}-{name}", std::process::id());
    let jobs = ["one", "other"].map(|name| {
        let job = job(name);
        (0..2).map(|rank| Rank::start("sum", &open_mpi(rank, 2, &job))).collect::<Vec<_>>()
    });
    jobs.into_iter().for_each(all_are_done);
}

#[test]
fn a_killed_process_is_named_by_all_others_at_once() {
    let port = free_port();
    let mut ranks: Vec<Rank> = (0..3).map(|rank| Rank::start("until broken", &torchrun(rank, 3, port))).collect();
    ranks.iter_mut().for_each(|rank| drop(rank.wait_for("ready")));
    thread::sleep(Duration::from_millis(100));
    let killed_at = Instant::now();
    ranks[1].process.kill().unwrap();
    for rank in [0, 2] {
        let line = ranks[rank].wait_for("broken");
        assert!(line.contains("rank 1 of 3 ended"), "rank {rank}: {line}");
    }
    assert!(killed_at.elapsed() < Duration::from_secs(3), "{:?}", killed_at.elapsed());
}
