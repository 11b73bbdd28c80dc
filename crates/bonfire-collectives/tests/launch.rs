//! What each launcher's variables say, alone and beside others, and what explicit options change.

use bonfire_collectives::{LaunchConfig, LaunchEnvironment, LaunchError, LaunchOptions, Launcher, Token};

type Variables<'a> = &'a [(&'a str, &'a str)];

fn resolve(options: &LaunchOptions, variables: Variables<'_>) -> Result<LaunchConfig, LaunchError> {
    options.resolve_with(|wanted| lookup(variables, wanted))
}

fn read(variables: Variables<'_>) -> Result<LaunchConfig, LaunchError> {
    resolve(&LaunchOptions::default(), variables)
}

fn launcher(variables: Variables<'_>) -> Launcher {
    LaunchEnvironment::from_lookup(|wanted| lookup(variables, wanted)).unwrap().launcher
}

/// Of two that are given the later one counts.
fn lookup(variables: Variables<'_>, wanted: &str) -> Option<String> {
    variables.iter().rev().find(|(name, _)| *name == wanted).map(|(_, value)| value.to_string())
}

/// Rank, local rank, world size, address, port.
fn shown(config: &LaunchConfig) -> (usize, usize, usize, &str, u16) {
    (config.rank(), config.local_rank(), config.world_size().get(), config.address(), config.port())
}

/// An error names what is wrong, its value, and what to do.
fn refused(variables: Variables<'_>, said: &[&str]) {
    let message = read(variables).expect_err("it makes no sense").to_string();
    for part in said {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

const TORCHRUN: Variables<'_> = &[
    ("RANK", "5"),
    ("LOCAL_RANK", "1"),
    ("WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
];
const OPEN_MPI: Variables<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-node1-4711@1"),
];
const SLURM: Variables<'_> = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "6"),
    ("SLURM_LOCALID", "2"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_NODELIST", "node[03-05,7]"),
];

#[test]
fn nothing_set_is_one_rank_that_takes_any_free_port() {
    let config = read(&[]).unwrap();
    assert_eq!(shown(&config), (0, 0, 1, "127.0.0.1", 0));
    assert_eq!(config.token(), &Token::default());
    assert_eq!(launcher(&[]), Launcher::Alone);
    assert_eq!(read(&[("RANK", ""), ("WORLD_SIZE", " ")]).unwrap(), config, "empty is unset");
}

#[test]
fn torchrun_is_read() {
    assert_eq!(shown(&read(TORCHRUN).unwrap()), (5, 1, 8, "node1", 29500));
    assert_eq!(launcher(TORCHRUN), Launcher::Torchrun);
    // By hand, as without torchrun.
    assert_eq!(shown(&read(&TORCHRUN[..5]).unwrap()), (5, 1, 8, "node1", 29500));
}

#[test]
fn the_port_of_torchruns_own_store_is_left_to_it() {
    let with = |port| [TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_PORT", port)]].concat();
    assert_eq!(read(&with("29500")).unwrap().port(), 29501);
    refused(&with("65535"), &["MASTER_PORT", "65535"]);
    let without = [TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]].concat();
    assert_eq!(read(&without).unwrap().port(), 29500);
}

#[test]
fn open_mpi_is_read() {
    let with_address = [OPEN_MPI, &[("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")]].concat();
    assert_eq!(shown(&read(&with_address).unwrap()), (3, 1, 4, "node1", 29500));
    assert_eq!(launcher(OPEN_MPI), Launcher::OpenMpi);
    refused(OPEN_MPI, &["4 ranks (Open MPI)", "address of rank 0", "set MASTER_ADDR"]);

    let on_one_node = [OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]].concat();
    let config = read(&on_one_node).unwrap();
    assert_eq!(config.address(), "127.0.0.1");
    assert!((20_000..30_000).contains(&config.port()), "{}", config.port());
    // Two jobs at once.
    let other = read(&[&*on_one_node, &[("PMIX_NAMESPACE", "prterun-node1-4712@1")]].concat()).unwrap();
    assert_ne!(config.port(), other.port());
    assert_ne!(config.token(), other.token());
    // Without a name for the job there is nothing to derive a port from.
    refused(&[&*on_one_node, &[("PMIX_NAMESPACE", "")]].concat(), &["port of rank 0", "set MASTER_PORT"]);
}

#[test]
fn slurm_is_read() {
    let config = read(SLURM).unwrap();
    let port = config.port();
    assert_eq!(shown(&config), (6, 2, 8, "node03", port));
    assert!((20_000..30_000).contains(&port), "{port}");
    assert_eq!(launcher(SLURM), Launcher::Slurm);

    let other_rank = read(&[SLURM, &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")]].concat()).unwrap();
    assert_eq!((other_rank.port(), other_rank.token()), (port, config.token()), "ranks of a job meet");
    let other_job = read(&[SLURM, &[("SLURM_JOB_ID", "4712")]].concat()).unwrap();
    assert_ne!(other_job.port(), port);
    assert_ne!(other_job.token(), config.token());

    let by_hand = [SLURM, &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")]].concat();
    assert_eq!(shown(&read(&by_hand).unwrap()), (6, 2, 8, "10.0.0.1", 29500));
    // A step may take fewer tasks and nodes than the job has.
    let step = [SLURM, &[("SLURM_STEP_NUM_TASKS", "7"), ("SLURM_STEP_NODELIST", "node[05,7]")]].concat();
    assert_eq!(shown(&read(&step).unwrap()), (6, 2, 7, "node05", port));
    refused(&[SLURM, &[("SLURM_NODELIST", "node[")]].concat(), &["SLURM_NODELIST", "node[", "node[03-05,7]"]);
}

#[test]
fn slurm_counts_only_where_it_started_the_program() {
    // In a shell that salloc gave: room for eight tasks, of which none runs.
    let shell: Variables<'_> = &[("SLURM_JOB_ID", "1"), ("SLURM_NTASKS", "8"), ("SLURM_NODELIST", "n[1-2]")];
    assert_eq!(read(shell).unwrap(), read(&[]).unwrap());
    // In a batch script, which is a task of its own.
    let batch: Variables<'_> = &[("SLURM_JOB_ID", "1"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")];
    assert_eq!(read(batch).unwrap(), read(&[]).unwrap());
    refused(&[batch, &[("SLURM_NTASKS", "8")]].concat(), &["SLURM_NTASKS is 8", "SLURM_STEP_ID", "srun"]);
    // The same script may start Open MPI's ranks.
    let mpirun = [batch, &[("SLURM_NTASKS", "8"), ("MASTER_ADDR", "n1")], OPEN_MPI].concat();
    assert_eq!(read(&mpirun).unwrap().rank(), 3);
}

#[test]
fn the_innermost_launcher_counts() {
    let all = [SLURM, OPEN_MPI, TORCHRUN].concat();
    assert_eq!(launcher(&all), Launcher::Torchrun);
    assert_eq!(shown(&read(&all).unwrap()), (5, 1, 8, "node1", 29500));
    let two = [SLURM, OPEN_MPI, &[("MASTER_ADDR", "node1")]].concat();
    assert_eq!(launcher(&two), Launcher::OpenMpi);
    assert_eq!(read(&two).unwrap().world_size().get(), 4);
}

#[test]
fn variables_set_by_hand_must_agree_with_the_launcher() {
    let agreeing: Variables<'_> = &[("WORLD_SIZE", "8"), ("RANK", "6")];
    assert_eq!(read(&[SLURM, agreeing].concat()).unwrap(), read(SLURM).unwrap());
    let contradiction = ["WORLD_SIZE is 1", "SLURM_NTASKS is 8", "unset WORLD_SIZE"];
    refused(&[SLURM, &[("WORLD_SIZE", "1")]].concat(), &contradiction);
    refused(&[OPEN_MPI, &[("RANK", "0")]].concat(), &["RANK is 0", "OMPI_COMM_WORLD_RANK is 3"]);
    refused(&[OPEN_MPI, &[("LOCAL_RANK", "0")]].concat(), &["LOCAL_RANK is 0", "OMPI_COMM_WORLD_LOCAL_RANK is 1"]);
}

#[test]
fn half_of_a_launchers_variables_is_refused() {
    for (family, num_variables) in [(TORCHRUN, 3), (OPEN_MPI, 3)] {
        for missing in 0..num_variables {
            let rest: Vec<_> = (0..num_variables).filter(|&i| i != missing).map(|i| family[i]).collect();
            let said = [family[missing].0, "is not set", rest[0].0, rest[0].1, "unset"];
            refused(&rest, &said);
        }
    }
    for (missing, set) in [("SLURM_PROCID", "SLURM_LOCALID"), ("SLURM_LOCALID", "SLURM_PROCID")] {
        refused(&[SLURM, &[(missing, "")]].concat(), &[missing, "is not set", set]);
    }
    refused(&[SLURM, &[("SLURM_NTASKS", "")]].concat(), &["SLURM_NTASKS is not set", "SLURM_PROCID", "6"]);
    refused(&[("TORCHELASTIC_RUN_ID", "none")], &["TORCHELASTIC_RUN_ID", "RANK is not set"]);
    refused(&TORCHRUN[..3], &["8 ranks", "address of rank 0", "MASTER_ADDR"]);
    refused(&TORCHRUN[..4], &["8 ranks", "port of rank 0", "MASTER_PORT"]);
}

#[test]
fn odd_values_are_refused_by_name() {
    for value in ["-1", "one", "1.5", "0x1", "99999999999999999999999"] {
        for variable in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"] {
            refused(&[TORCHRUN, &[(variable, value)]].concat(), &[variable, value, "correct it"]);
        }
        for variable in ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"] {
            refused(&[OPEN_MPI, &[(variable, value)]].concat(), &[variable, value]);
        }
        for variable in ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"] {
            refused(&[SLURM, &[(variable, value)]].concat(), &[variable, value]);
        }
    }
    refused(&[TORCHRUN, &[("RANK", "8")]].concat(), &["RANK is 8", "below 8 (WORLD_SIZE)"]);
    refused(&[TORCHRUN, &[("LOCAL_RANK", "8")]].concat(), &["LOCAL_RANK is 8", "below 8"]);
    refused(&[TORCHRUN, &[("WORLD_SIZE", "0")]].concat(), &["WORLD_SIZE", "\"0\"", "at least 1"]);
    refused(&[SLURM, &[("SLURM_PROCID", "8")]].concat(), &["SLURM_PROCID is 8", "below 8 (SLURM_NTASKS)"]);
    refused(&[TORCHRUN, &[("MASTER_PORT", "0")]].concat(), &["MASTER_PORT", "\"0\"", "from 1"]);
    refused(&[TORCHRUN, &[("MASTER_PORT", "65536")]].concat(), &["MASTER_PORT", "65536"]);
    for address in ["node1:29500", "http://node1", "two words", "::1:x"] {
        refused(&[TORCHRUN, &[("MASTER_ADDR", address)]].concat(), &["MASTER_ADDR", address, "without a port"]);
    }
    let token = "x".repeat(257);
    refused(&[("BONFIRE_TOKEN", &token)], &["BONFIRE_TOKEN", "257 bytes", "256"]);
}

#[test]
fn addresses_of_either_family_are_taken() {
    for address in ["::1", "fe80::1", "10.1.2.3", "node-1.cluster.example", "localhost"] {
        assert_eq!(read(&[TORCHRUN, &[("MASTER_ADDR", address)]].concat()).unwrap().address(), address);
    }
}

#[test]
fn an_explicit_option_wins_and_the_rest_stays() {
    let explicit = |set: fn(&mut LaunchOptions)| {
        let mut options = LaunchOptions::default();
        set(&mut options);
        resolve(&options, TORCHRUN).unwrap()
    };
    assert_eq!(shown(&explicit(|options| options.rank = Some(2))), (2, 1, 8, "node1", 29500));
    assert_eq!(shown(&explicit(|options| options.local_rank = Some(0))), (5, 0, 8, "node1", 29500));
    assert_eq!(shown(&explicit(|options| options.world_size = Some(6))), (5, 1, 6, "node1", 29500));
    assert_eq!(shown(&explicit(|options| options.address = Some("::1".into()))), (5, 1, 8, "::1", 29500));
    assert_eq!(shown(&explicit(|options| options.port = Some(7000))), (5, 1, 8, "node1", 7000));
    let token = Token::new("campfire").unwrap();
    let by_variable = [TORCHRUN, &[("BONFIRE_TOKEN", "campfire")]].concat();
    assert_eq!(read(&by_variable).unwrap().token(), &token);
    let options = LaunchOptions { token: Some(Token::new("other").unwrap()), ..Default::default() };
    assert_eq!(resolve(&options, &by_variable).unwrap().token(), &Token::new("other").unwrap());
}

#[test]
fn complete_options_ask_no_launcher() {
    let options = LaunchOptions {
        rank: Some(1),
        local_rank: Some(1),
        world_size: Some(2),
        address: Some("localhost".into()),
        port: Some(7000),
        token: None,
    };
    let broken = [TORCHRUN, OPEN_MPI, &[("RANK", "many"), ("BONFIRE_TOKEN", "t")]].concat();
    let config = resolve(&options, &broken).unwrap();
    assert_eq!(shown(&config), (1, 1, 2, "localhost", 7000));
    assert_eq!(config.token(), &Token::new("t").unwrap());
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let refused = |options: LaunchOptions, said: &[&str]| {
        let message = resolve(&options, &[]).unwrap_err().to_string();
        assert!(said.iter().all(|part| message.contains(part)), "{message}");
    };
    let options = LaunchOptions::default;
    refused(LaunchOptions { rank: Some(1), ..options() }, &["option rank is 1", "below 1 (the default)"]);
    refused(LaunchOptions { world_size: Some(0), ..options() }, &["option world_size", "at least 1"]);
    // Each process would take itself for rank 0.
    refused(LaunchOptions { world_size: Some(2), ..options() }, &["option world_size", "2", "option rank is not set"]);
    let ranked = LaunchOptions { world_size: Some(2), rank: Some(1), ..options() };
    refused(ranked.clone(), &["option local_rank is not set"]);
    let placed = LaunchOptions { local_rank: Some(1), ..ranked };
    refused(placed.clone(), &["2 ranks (no launcher)", "the option address"]);
    refused(LaunchOptions { address: Some("h".into()), port: Some(0), ..placed.clone() }, &["option port", "\"0\""]);
    refused(LaunchOptions { address: Some("h:1".into()), port: Some(1), ..placed }, &["option address", "h:1"]);
}

#[cfg(feature = "serde")]
#[test]
fn options_are_read_from_text_and_unknown_ones_refused() {
    let options: LaunchOptions = serde_json::from_str(r#"{"rank": 1, "port": 7000, "token": "campfire"}"#).unwrap();
    let token = Some(Token::new("campfire").unwrap());
    assert_eq!(options, LaunchOptions { rank: Some(1), port: Some(7000), token, ..Default::default() });
    let text = serde_json::to_string(&options).unwrap();
    assert_eq!(serde_json::from_str::<LaunchOptions>(&text).unwrap(), options);
    assert_eq!(serde_json::from_str::<LaunchOptions>("{}").unwrap(), LaunchOptions::default());
    for text in [r#"{"ranks": 1}"#, r#"{"rank": -1}"#, r#"{"port": 65536}"#, r#"{"rank": "one"}"#] {
        serde_json::from_str::<LaunchOptions>(text).unwrap_err();
    }
    let long = format!(r#"{{"token": "{}"}}"#, "x".repeat(257));
    assert!(serde_json::from_str::<LaunchOptions>(&long).unwrap_err().to_string().contains("at most 256"));
}
