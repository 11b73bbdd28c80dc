//! The line of JSON that ends a run of the MNIST example.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// What a run says of itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MnistReport {
    backend: String,
    members: usize,
    /// Of the example on ranks.
    #[serde(default = "one")]
    pub(crate) world_size: usize,
    epochs: usize,
    train_loss: Vec<f64>,
    /// Share of the test images that the trained model labels correctly, 0 to 1.
    pub(crate) test_accuracy: f64,
    seconds: f64,
    items_per_second: f64,
}

const fn one() -> usize {
    1
}

impl MnistReport {
    /// The report in the last line of what a run wrote on stdout.
    pub(crate) fn from_stdout(stdout: &str) -> Result<Self> {
        let line = stdout.lines().last().context("the run wrote nothing on stdout")?;
        serde_json::from_str(line).with_context(|| format!("the last line is no report: {line}"))
    }

    /// What holds of every run that learns.
    pub(crate) fn check(&self, members: usize, epochs: usize) -> Result<()> {
        const MIN_ACCURACY: f64 = 0.9;
        ensure!(!self.backend.is_empty(), "the backend has no name");
        ensure!(self.members == members, "{} members, asked for {members}", self.members);
        ensure!(
            (self.epochs, self.train_loss.len()) == (epochs, epochs),
            "{} epochs with {} losses, asked for {epochs}",
            self.epochs,
            self.train_loss.len(),
        );
        ensure!(self.train_loss.iter().all(|loss| *loss > 0.0 && loss.is_finite()), "losses {:?}", self.train_loss);
        ensure!(self.train_loss.is_sorted_by(|a, b| a > b), "the loss does not fall: {:?}", self.train_loss);
        ensure!((MIN_ACCURACY..=1.0).contains(&self.test_accuracy), "the accuracy is {}", self.test_accuracy);
        ensure!(self.seconds > 0.0 && self.items_per_second > 0.0, "it took {} s", self.seconds);
        Ok(())
    }

    /// Both runs learned the same, up to the given differences.
    pub(crate) fn check_agrees(&self, other: &Self, max_loss_gap: f64, max_accuracy_gap: f64) -> Result<()> {
        let close = |a: &f64, b: &f64| (a - b).abs() <= max_loss_gap;
        ensure!(
            self.train_loss.iter().zip(&other.train_loss).all(|(a, b)| close(a, b)),
            "losses {:?} and {:?} differ by more than {max_loss_gap}",
            self.train_loss,
            other.train_loss,
        );
        ensure!(
            (self.test_accuracy - other.test_accuracy).abs() <= max_accuracy_gap,
            "accuracies {} and {} differ by more than {max_accuracy_gap}",
            self.test_accuracy,
            other.test_accuracy,
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"backend":"flex","members":1,"epochs":2,"train_loss":[0.5,0.2],"test_accuracy":0.97,"seconds":9.5,"items_per_second":1684.2}"#;

    fn report(from: &str, to: &str) -> MnistReport {
        assert!(LINE.contains(from));
        MnistReport::from_stdout(&LINE.replace(from, to)).unwrap()
    }

    #[test]
    fn the_last_line_is_the_report() {
        let report = MnistReport::from_stdout(&format!("training\n{LINE}\n")).unwrap();
        report.check(1, 2).unwrap();
        assert_eq!(report.test_accuracy, 0.97);
    }

    #[test]
    fn a_missing_line_field_or_number_is_refused() {
        for stdout in ["", "done", &LINE.replace("\"members\":1,", ""), &LINE.replace("0.97", "null")] {
            assert!(MnistReport::from_stdout(stdout).is_err(), "{stdout}");
        }
        assert!(MnistReport::from_stdout(&format!("{LINE}\ndone")).is_err());
        assert!(MnistReport::from_stdout(&LINE.replace("seconds\":9.5", "secs\":9.5")).is_err());
    }

    #[test]
    fn a_run_that_did_not_learn_or_did_something_else_is_refused() {
        for (from, to) in [
            ("\"flex\"", "\"\""),
            ("\"members\":1", "\"members\":2"),
            ("\"epochs\":2", "\"epochs\":3"),
            ("[0.5,0.2]", "[0.5]"),
            ("[0.5,0.2]", "[0.5,0.6]"),
            ("[0.5,0.2]", "[0.5,-0.2]"),
            ("0.97", "0.1"),
            ("0.97", "1.1"),
            ("9.5", "0.0"),
        ] {
            assert!(report(from, to).check(1, 2).is_err(), "{from} -> {to}");
        }
    }

    #[test]
    fn runs_agree_within_the_given_differences() {
        let one = report("0.97", "0.97");
        report("[0.5,0.2]", "[0.509,0.191]").check_agrees(&one, 1e-2, 0.01).unwrap();
        report("0.97", "0.961").check_agrees(&one, 1e-2, 0.01).unwrap();
        assert!(report("[0.5,0.2]", "[0.5,0.211]").check_agrees(&one, 1e-2, 0.01).is_err());
        assert!(report("0.97", "0.98001").check_agrees(&one, 1e-2, 0.01).is_err());
    }
}
