//! Running other programs from the root of the repository.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository")
}

/// `program` with `args`, in the root of the repository.
pub(crate) fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(root());
    command
}

/// Runs a command whose output the caller of xtask sees.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", shown(command));
    }
    Ok(())
}

/// What a command writes on stdout.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start {}", shown(command)))?;
    if !output.status.success() {
        bail!("{} failed: {}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} writes text", shown(command)))
}

/// As [`output`], of a command that is ended if it takes longer than `limit`.
pub(crate) fn output_within(limit: Duration, command: &mut Command) -> Result<String> {
    println!("$ {}", shown(command));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    // Read while it runs: a full pipe would stop it.
    let mut stdout = child.stdout.take().expect("stdout is piped");
    let reader = thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });

    let start = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if start.elapsed() > limit => {
                child.kill()?;
                child.wait()?;
                bail!(
                    "{} was ended after {} s: it hangs, or the machine is very slow",
                    shown(command),
                    limit.as_secs()
                );
            }
            None => thread::sleep(Duration::from_millis(50)),
        }
    };
    if !status.success() {
        bail!("{} failed: {status}", shown(command));
    }
    let text = reader.join().expect("the reader does not panic");
    text.with_context(|| format!("{} writes text", shown(command)))
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_what_the_command_writes() {
        let text = output_within(Duration::from_secs(60), &mut command("cargo", &["--version"])).unwrap();
        assert!(text.starts_with("cargo "), "{text}");
        assert_eq!(text, output(&mut command("cargo", &["--version"])).unwrap());
    }

    #[cfg(unix)]
    #[test]
    fn a_command_that_fails_is_named() {
        for result in [output(&mut command("false", &["x"])).map(drop), run(&mut command("false", &["x"]))] {
            assert!(result.unwrap_err().to_string().starts_with("false x failed"));
        }
        assert!(run(&mut command("no-such-program", &[])).unwrap_err().to_string().contains("cannot start"));
    }

    #[cfg(unix)]
    #[test]
    fn a_command_that_hangs_is_ended() {
        let message = output_within(Duration::from_millis(100), &mut command("sleep", &["60"])).unwrap_err();
        assert!(message.to_string().contains("sleep 60 was ended"), "{message}");
    }
}
