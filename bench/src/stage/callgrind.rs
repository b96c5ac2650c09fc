//! Reads what callgrind writes: instructions by function and source file.
//!
//! The format is described in the manual of valgrind, "Callgrind Format Specification".

use std::collections::HashMap;

/// Instructions of one function by the source files that its code comes from; code of other files
/// is in it where the compiler put functions into each other.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Profile {
    /// Function, then file, then instructions.
    pub(super) functions: HashMap<String, HashMap<String, u64>>,
}

impl Profile {
    /// Reads a whole output file.
    pub(super) fn parse(text: &str) -> Self {
        let mut profile = Self::default();
        let (mut files, mut names) = (HashMap::new(), HashMap::new());
        let (mut file, mut function) = (String::new(), String::new());
        let mut called = false;
        for line in text.lines() {
            let (word, rest) = line.split_once('=').unwrap_or((line, ""));
            match word {
                "fl" | "fi" | "fe" => file = named(&mut files, rest),
                "fn" => function = named(&mut names, rest),
                // What a called function costs is its own; its names may be told here first.
                "cfi" | "cfl" => drop(named(&mut files, rest)),
                "cfn" => drop(named(&mut names, rest)),
                "calls" => called = true,
                _ if called => called = false,
                _ => {
                    if let Some(cost) = cost(line) {
                        let files = profile.functions.entry(function.clone()).or_default();
                        *files.entry(file.clone()).or_default() += cost;
                    }
                }
            }
        }
        profile
    }

    /// Instructions of all functions.
    pub(super) fn all(&self) -> u64 {
        self.functions.values().flat_map(HashMap::values).sum()
    }
}

/// A name is told once, with a number that stands for it later: `(7) name`, then `(7)`.
fn named(known: &mut HashMap<String, String>, text: &str) -> String {
    match text.split_once(' ') {
        Some((number, name)) => {
            known.insert(number.to_owned(), name.to_owned());
            name.to_owned()
        }
        None => known.get(text).cloned().unwrap_or_default(),
    }
}

/// Of a line `POSITION COST`; positions are numbers, maybe relative.
fn cost(line: &str) -> Option<u64> {
    let (position, cost) = line.split_once(' ')?;
    let position = position.trim_start_matches(['+', '-', '*']);
    let is_position = position.bytes().all(|byte| byte.is_ascii_digit());
    is_position.then(|| cost.trim().parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_those_of_the_function_itself() {
        let text = "version: 1\npositions: line\nevents: Ir\nsummary: 99\n\nfl=(1) a.rs\nfn=(1) main\n\
                    10 3\n+2 4\ncfi=(2) b.rs\ncfn=(2) help\ncalls=1 5\n* 50\nfi=(2)\n7 1\n\nfl=(2)\n\
                    fn=(2)\n5 50\n";
        let profile = Profile::parse(text);
        let of = |function: &str, file: &str| profile.functions[function][file];
        assert_eq!(
            (of("main", "a.rs"), of("main", "b.rs"), of("help", "b.rs")),
            (7, 1, 50)
        );
        assert_eq!(profile.all(), 58);
    }
}
