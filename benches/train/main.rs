//! Training steps of ranks, threads or processes, against the same steps without ranks, interleaved in one run.
//!
//! `cargo bench --bench train` prints a JSON line per figure, see `benches/steps/main.rs`.

#![allow(unreachable_pub)]

mod contenders;
mod learner;
mod processes;
#[path = "../steps/rounds.rs"]
#[allow(dead_code)]
mod rounds;
#[path = "../steps/subjects/mod.rs"]
#[allow(dead_code)]
mod subjects;

use contenders::{Contender, free, ranks};
use rounds::{Goal, Rounds};
use subjects::{Cnn, CnnModel, Mlp, MlpModel, Subject};

fn main() {
    if processes::is_rank() {
        return processes::run_rank();
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |group: &str| wanted.is_empty() || wanted.iter().any(|word| group.contains(word.as_str()));
    if is_wanted("learner") {
        learner::one_rank::<CnnModel<_>>("CNN, batch 64", 64, 10, Goal::AtMost(1.02));
        learner::one_rank::<MlpModel<_>>("MLP, batch 64", 64, 100, Goal::AtMost(1.1));
        learner::one_rank::<MlpModel<_>>("MLP, batch 256", 256, 60, Goal::AtMost(1.1));
    }
    if is_wanted("processes") {
        processes::start();
    }
    if is_wanted("cnn") {
        overhead::<Cnn>("CNN, batch 64", 64, 5, Goal::AtMost(1.02));
        scaling::<Cnn>("CNN, batch 64", 64, 5, Goal::AtLeast(0.85));
        scaling::<Cnn>("CNN, batch 256", 256, 2, Goal::AtLeast(0.85));
    }
    if is_wanted("mlp") {
        overhead::<Mlp>("MLP, batch 64", 64, 50, Goal::AtMost(1.1));
        overhead::<Mlp>("MLP, batch 256", 256, 30, Goal::AtMost(1.1));
        scaling::<Mlp>("MLP, batch 256", 256, 30, Goal::AtLeast(0.65));
    }
}

fn overhead<S: Subject>(name: &str, batch_size: usize, num_steps: usize, goal: Goal) {
    let contenders: Vec<Contender> = vec![free::<S>(1, batch_size, num_steps), ranks::<S>(1, batch_size, num_steps)];
    let rounds = Rounds::measure(contenders);
    rounds.report(&format!("{name}: time of a training step of one rank over one without ranks"), 1, 0, goal);
}

fn scaling<S: Subject>(name: &str, batch_size: usize, num_steps: usize, goal: Goal) {
    let free_alone = free::<S>(1, batch_size, num_steps);
    let contenders: Vec<Contender> =
        vec![free::<S>(2, batch_size, num_steps), ranks::<S>(2, batch_size, num_steps), free_alone];
    let rounds = Rounds::measure(contenders);
    rounds.report(&format!("{name}: rate of 2 ranks over two free threads"), 0, 1, goal);
    rounds.report(&format!("{name}: rate of 2 ranks over one thread"), 2, 1, Goal::None);
}
