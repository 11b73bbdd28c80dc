//! Names that say nothing, and code that is not there yet.

/// Files are named after their main type or verb.
const FORBIDDEN_NAMES: &[&str] = &["base.rs", "utils.rs", "common.rs"];

/// Marks of unfinished code, in two parts so that this file does not hold them.
const FORBIDDEN_WORDS: &[(&str, &str)] = &[("todo", "!"), ("unimplemented", "!")];

/// `read` gives the text of a file, and nothing for a file that is not text.
pub(super) fn problems(files: &[String], read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut problems = Vec::new();
    for path in files {
        let name = path.rsplit('/').next().unwrap_or(path);
        if FORBIDDEN_NAMES.contains(&name) {
            problems.push(format!("{path}: name it after its main type or verb"));
        }
        if let Some(text) = read(path) {
            problems.extend(word_problems(path, &text));
        }
    }
    problems
}

fn word_problems(path: &str, text: &str) -> Vec<String> {
    let words: Vec<String> = FORBIDDEN_WORDS.iter().map(|(start, end)| format!("{start}{end}")).collect();
    let lines = text.lines().zip(1..);
    lines
        .flat_map(|(line, number)| {
            let found = words.iter().filter(move |word| line.contains(word.as_str()));
            found.map(move |word| format!("{path}:{number}: {word} marks a stub; finish it or leave it out"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_in(path: &str, text: Option<&str>) -> Vec<String> {
        problems(&[path.into()], |_| text.map(String::from))
    }

    #[test]
    fn names_that_say_nothing_are_problems() {
        assert_eq!(problems_in("crates/x/src/utils.rs", None).len(), 1);
        assert_eq!(problems_in("base.rs", None).len(), 1);
        assert_eq!(problems_in("crates/x/src/database.rs", None), [""; 0]);
        assert_eq!(problems_in("crates/base.rs/lib.rs", None), [""; 0]);
    }

    #[test]
    fn a_stub_is_found_on_its_line() {
        let text = format!("fn f() {{\n    {}!()\n}}\n", "todo");
        assert_eq!(problems_in("src/lib.rs", Some(&text)).len(), 1);
        assert!(problems_in("src/lib.rs", Some(&text))[0].starts_with("src/lib.rs:2: "));
        assert_eq!(problems_in("src/lib.rs", Some("a todo list")), [""; 0]);
    }
}
