"use strict";

/* The settings of the next request: read from the form, and checked before anything is sent. */

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string" },
    born: { type: "integer" },
    known_for: { type: "array", items: { type: "string" }, minItems: 2, maxItems: 4 },
  },
  required: ["name", "born", "known_for"],
  additionalProperties: false,
};

const NUMBERS = [
  { id: "temperature", name: "The temperature", field: "temperature", least: 0, whole: false },
  { id: "max-tokens", name: "The limit of tokens", field: "max_tokens", least: 1, whole: true },
  { id: "seed", name: "The seed", field: "seed", least: 0, whole: true },
];
const MAX_DRAFT = { id: "max-draft", name: "The draft length", field: "max_draft", least: 1, whole: true };

/** A setting that cannot be sent; `input` is the element at fault. */
class SettingComplaint extends Error {
  constructor(sentence, input) {
    super(sentence);
    this.input = input;
  }
}

class Settings {
  constructor() {
    byId("policy").addEventListener("change", () => this.showDraftLength());
    byId("schema").addEventListener("input", () => this.noteSchema());
    byId("schema-example").addEventListener("click", () => {
      byId("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
      byId("schema").dispatchEvent(new Event("input", { bubbles: true }));
    });
    byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
    this.showDraftLength();
    this.noteSchema();
  }

  get system() {
    return byId("system").value.trim();
  }

  /** The fields of a request but its model and messages. Raises SettingComplaint. */
  request() {
    const body = { stream: true, stream_options: { include_usage: true } };
    for (const wanted of NUMBERS) {
      const value = numberOf(wanted);
      if (value !== null) body[wanted.field] = value;
    }
    body.speculation = this.speculation();
    const schema = this.schema();
    if (schema !== null) {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    }
    const content = byId("prediction").value;
    if (content.trim()) body.prediction = { type: "content", content };
    if (byId("bitwise").checked) body.bitwise = true;
    return body;
  }

  speculation() {
    const policy = byId("policy").value;
    const wanted = { show_sources: true };
    if (policy) wanted.policy = policy;
    const length = policy === "fixed" ? numberOf(MAX_DRAFT) : null;
    if (length !== null) wanted.max_draft = length;
    return wanted;
  }

  /** The schema that was typed in, null for none. Raises SettingComplaint. */
  schema() {
    const input = byId("schema");
    if (!input.value.trim()) return null;
    let schema;
    try {
      schema = JSON.parse(input.value);
    } catch (error) {
      throw new SettingComplaint(`The JSON schema is not valid JSON: ${error.message}.`, input);
    }
    if (schema === null || typeof schema !== "object" || Array.isArray(schema)) {
      throw new SettingComplaint("The JSON schema must be an object, in braces.", input);
    }
    return schema;
  }

  noteSchema() {
    let note = "Empty: free text.";
    let isWrong = false;
    try {
      if (this.schema() !== null) note = "The answer will be JSON of this schema.";
    } catch (complaint) {
      note = complaint.message;
      isWrong = true;
    }
    byId("schema").setAttribute("aria-invalid", String(isWrong));
    byId("schema-note").textContent = note;
    byId("schema-example").hidden = Boolean(byId("schema").value.trim());
  }

  showDraftLength() {
    byId("max-draft-field").hidden = byId("policy").value !== "fixed";
  }

  /** Leave out what this server cannot do, as `status` says. */
  offer({ draft, bitwise }) {
    byId("policy").querySelector("[value=model]").disabled = !draft;
    byId("bitwise").disabled = !bitwise;
    if (!bitwise) byId("bitwise").checked = false;
    byId("bitwise-note").textContent = bitwise
      ? "The text of plain decoding, bit for bit; what is drawn is drawn by the seed-stable rule."
      : "This server does not keep it: it was started without --bitwise.";
  }
}

function numberOf({ id, name, least, whole }) {
  const input = byId(id);
  const value = input.valueAsNumber;
  const isEmpty = input.value === "" && !input.validity.badInput;
  const isRight = isEmpty || (value >= least && (!whole || Number.isSafeInteger(value)));
  input.setAttribute("aria-invalid", String(!isRight));
  if (isEmpty) return null;
  if (isRight) return value;
  throw new SettingComplaint(`${name} must be a ${whole ? "whole " : ""}number, ${least} or more.`, input);
}
