// What the programs with cases of a client from npm share. node FILE URL MODEL TEXT: runs all cases of the file against
// `outrider serve` and writes {name: null, or what went wrong}. TEXT is what the engine says to the question in 24
// tokens; the key is in $OPENAI_API_KEY.

export const [address, model, expected] = process.argv.slice(2);
export const key = process.env.OPENAI_API_KEY;
export const question = "Write the alphabet in small letters.";
export const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo", "Lima"] } },
  required: ["city"],
  additionalProperties: false,
};

export const ask = (content) => [{ role: "user", content }];

export async function runCases(file) {
  const cases = await import(file);
  const outcomes = {};
  for (const [name, run] of Object.entries(cases)) outcomes[name] = await run().then(() => null, (error) => error.stack ?? String(error));
  console.log(JSON.stringify(outcomes));
}
